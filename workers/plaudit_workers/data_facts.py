"""Record what was read of a job's training data, so that a resumed run notices that its data is another.

The trainer keeps the facts in each checkpoint; ``plaudit run --resume`` compares them before it starts a process, and
the trainer when it loads the checkpoint.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from plaudit_wire.errors import RefusedError
from plaudit_workers.data_files import NumberedRow
from plaudit_workers.files import whole_file

ACCEPTED_FILE = "accepted-data.json"
"""In the run's folder: the facts of changed data with which the user continues the run."""
_DIGEST_BYTES = 16
_SHOWN_FILES = 4
_encoder = msgspec.msgpack.Encoder()


class FileFacts(msgspec.Struct, frozen=True):
    """Describe the rows of one file."""

    path: str
    rows: int
    digest: str
    """Of the rows as plain data: the same for other formats and compressions of the same rows."""


class DataFacts(msgspec.Struct, frozen=True):
    """Describe the training data that a run reads."""

    files: list[FileFacts]

    @classmethod
    def restored(cls, plain: Mapping[str, Any] | None) -> DataFacts | None:
        """Return the facts that a checkpoint holds; None for a checkpoint of an earlier version."""
        return None if plain is None else msgspec.convert(plain, cls)

    @property
    def digests(self) -> list[str]:
        """Return what decides whether data is the same: the files' contents, in order."""
        return [file.digest for file in self.files]

    def by_name(self) -> dict[str, FileFacts]:
        """Return the files by their names; those that share one by their paths. A moved file is the same."""
        shared = Counter(Path(file.path).name for file in self.files)
        return {file.path if shared[name := Path(file.path).name] > 1 else name: file for file in self.files}

    def plain(self) -> dict[str, Any]:
        """Return the facts as plain data."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def changes_since(self, before: DataFacts | None) -> list[str]:
        """Return in words what differs from other facts; nothing where there are none."""
        if before is None or before.digests == self.digests:
            return []
        old, new = before.by_name(), self.by_name()
        changes = [_change(name, old[name], new[name]) for name in old if name in new]
        changes += [f"{name} ({old[name].rows:,} rows) is gone" for name in old if name not in new]
        changes += [f"{name} ({new[name].rows:,} rows) is new" for name in new if name not in old]
        changes = [change for change in changes if change] or ["the order of the files"]
        more = len(changes) - _SHOWN_FILES
        return changes[:_SHOWN_FILES] + ([f"{more} further files"] if more > 0 else [])


def _change(name: str, old: FileFacts, new: FileFacts) -> str:
    if old.digest == new.digest:
        return ""
    if old.rows == new.rows:
        return f"{name} has other contents in its {new.rows:,} rows"
    return f"{name} has {new.rows:,} rows; it had {old.rows:,}"


class FactsOfRows:
    """Collect the facts of rows while they are read."""

    def __init__(self) -> None:
        self._hashes: dict[Path, Any] = {}
        self._rows: Counter[Path] = Counter()

    def add(self, row: NumberedRow) -> None:
        """Count one row."""
        if row.path not in self._hashes:
            self._hashes[row.path] = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self._hashes[row.path].update(_encoder.encode(row.row))
        self._rows[row.path] += 1

    @property
    def num_rows(self) -> int:
        """Return the rows of all files."""
        return self._rows.total()

    def facts(self) -> DataFacts:
        """Return the facts of all rows so far."""
        return DataFacts(
            [FileFacts(str(path), self._rows[path], own.hexdigest()) for path, own in self._hashes.items()]
        )


def accept(folder: Path, facts: DataFacts) -> None:
    """Record that the run in a folder continues with these data."""
    with whole_file(folder / ACCEPTED_FILE) as path:
        path.write_bytes(msgspec.json.encode(facts))


def refuse_changed_data(facts: DataFacts, before: DataFacts | None, folder: Path) -> list[str]:
    """Return how data differs from a checkpoint's; raise ``RefusedError`` unless it does not, or this is accepted."""
    changes = facts.changes_since(before)
    if changes and facts.digests != _accepted(folder):
        raise RefusedError(
            f"the training data changed since the checkpoint of the run in {folder}: {'; '.join(changes)}. Its next "
            "prompts would be others than those it has not trained yet. Put the data back, or continue with "
            "plaudit run --resume --accept-data-change; a new run with trainer.checkpoint.resumeFrom begins changed "
            "data at its beginning"
        )
    return changes


def _accepted(folder: Path) -> list[str] | None:
    try:
        return msgspec.json.decode((folder / ACCEPTED_FILE).read_bytes(), type=DataFacts).digests
    except (OSError, msgspec.DecodeError):
        return None
