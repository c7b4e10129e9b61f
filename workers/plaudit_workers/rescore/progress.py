"""Keep the scorings of a rescore beside its output, so that the same command continues after a kill.

``<output>.progress`` has one line for what decides the scores, then one for each unit, in order. A line that a kill has
cut is removed. The file goes when the output is complete.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from types import TracebackType

import msgspec

from plaudit_wire.errors import RefusedError
from plaudit_wire.records import ScoringRecord


class _Head(msgspec.Struct, frozen=True):
    samples: str
    version: str
    attempt: str


class _Line(msgspec.Struct, frozen=True):
    id: str
    scorings: list[ScoringRecord]


class Progress:
    """Hold the units that are scored already, in order.

    Args:
        output: of the command; None: nothing is kept.
        samples: what is scored, in words that differ for other samples.

    Attributes:
        attempt: name of this rescore, which a resumed command repeats and a new one does not.

    Raises:
        RefusedError: the file is of other samples or other scorers, or cannot be written.
    """

    def __init__(self, output: Path | None, samples: str, version: str) -> None:
        self._path = None if output is None else output.with_name(f"{output.name}.progress")
        self._head = _Head(samples, version, uuid.uuid4().hex[:12])
        self._kept: list[int] = []
        if self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.touch()
                self._file = self._path.open("r+b")
            except OSError as error:
                raise RefusedError(f"--output {output}: {self._path} cannot be written: {error.strerror}") from error
            try:
                self._read_head(self._path)
            except RefusedError:
                self._file.close()
                raise
        self.attempt = self._head.attempt

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._path is not None:
            self._file.close()
            if kind is None:
                self._path.unlink()

    def scored(self, name: str, size: int) -> list[ScoringRecord] | None:
        """Return the kept scorings of the next unit; None from the first one on that has none.

        Raises:
            RefusedError: the line is of another unit: the stored samples have changed.
        """
        if self._path is None:
            return None
        place = self._file.tell()
        line = self._file.readline()
        kept = _decoded(line)
        if kept is None:
            self._file.seek(place)
            self._file.truncate()
            return None
        if kept.id != name or len(kept.scorings) != size:
            raise RefusedError(
                f"{self._path} has the scores of other samples than those stored now. Delete it to score all anew"
            )
        return kept.scorings

    def keep(self, name: str, scorings: list[ScoringRecord]) -> None:
        """Append the scorings of the next unit."""
        if self._path is not None:
            self._file.write(msgspec.json.encode(_Line(name, scorings)) + b"\n")
            self._file.flush()

    def _read_head(self, path: Path) -> None:
        line = self._file.readline()
        if not line.endswith(b"\n"):
            self._file.seek(0)
            self._file.truncate()
            self._file.write(msgspec.json.encode(self._head) + b"\n")
            self._file.flush()
            return
        try:
            head = msgspec.json.decode(line, type=_Head)
        except msgspec.DecodeError as error:
            raise RefusedError(f"{path} is not the progress of a rescore: {error}. Delete or rename it") from error
        for field, was, now in (
            ("samples", head.samples, self._head.samples),
            ("scorers", head.version, self._head.version),
        ):
            if was != now:
                raise RefusedError(
                    f"{path} is the unfinished rescore of other {field} ({was}, now {now}). Delete it to score all "
                    "samples anew, or name another --output"
                )
        self._head = head


def _decoded(line: bytes) -> _Line | None:
    if not line.endswith(b"\n"):
        return None
    try:
        return msgspec.json.decode(line, type=_Line)
    except msgspec.DecodeError:
        return None
