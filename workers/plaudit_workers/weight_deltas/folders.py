"""Find the chain to a published version: the versions on which its delta rests, back to one that is whole.

With ``trainer.weights.fullEvery`` above 1, a folder of published weights holds, besides ``probe.json``:

- ``delta.json`` and, for each weight file, ``NAME.delta`` with what changed since the version before; or
- the weight files whole; or both, so that rollouts that hold the version before need not read the whole ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from plaudit_workers.weight_deltas.encoding import DeltaError

DELTA_FILE = "delta.json"
DELTA_SUFFIX = ".delta"


class DeltaRecord(msgspec.Struct, frozen=True):
    """Hold the content of ``delta.json``: what the folder's deltas change."""

    base: str
    """The version before, the name of a sibling folder."""
    digest: str
    """``combined_digest`` of the whole files that result."""


class DeltaChain(NamedTuple):
    """Hold the deltas that lead to a version."""

    start: Path
    """Folder of the version from which to start. It may have been deleted if it is the version that is held."""
    deltas: list[Path]
    """Folders whose deltas to apply, the oldest first."""


def is_whole(folder: Path) -> bool:
    """Return True if the folder holds whole weight files."""
    return any(folder.glob("*.safetensors"))


def is_delta_only(folder: Path) -> bool:
    """Return True if the folder holds no whole files, but a delta from which they can be restored."""
    return (folder / DELTA_FILE).exists() and not is_whole(folder)


def read_record(folder: Path) -> DeltaRecord | None:
    """Return the folder's record; None if it has no delta, or does not exist.

    Raises:
        DeltaError: it is damaged.
    """
    path = folder / DELTA_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=DeltaRecord)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except msgspec.MsgspecError as error:
        raise DeltaError(f"{path} is damaged: {error}") from error


def chain_from_held(folder: Path, held: str) -> DeltaChain | None:
    """Return the chain from a version that is held to that of the folder; None if deltas do not lead there.

    Raises:
        DeltaError: a record is damaged.
        OSError: a record cannot be read.
    """
    return _chain(folder, lambda each: each.name == held)


def chain_from_whole(folder: Path) -> DeltaChain:
    """Return the chain to the folder's version from the nearest one that is whole.

    Raises:
        DeltaError: there is none, or a record is damaged.
        OSError: a record cannot be read.
    """
    chain = _chain(folder, is_whole)
    if chain is None:
        raise DeltaError(f"no whole version leads to {folder}")
    return chain


def _chain(folder: Path, starts_at: Callable[[Path], bool]) -> DeltaChain | None:
    deltas: list[Path] = []
    for each in _lineage(folder):
        if starts_at(each):
            return DeltaChain(each, deltas[::-1])
        deltas.append(each)
    return None


def _lineage(folder: Path) -> Iterator[Path]:
    """Yield the folder and those on which its delta rests, the newest first; the last one may not exist."""
    seen: set[str] = set()
    while folder.name not in seen:
        yield folder
        seen.add(folder.name)
        record = read_record(folder)
        if record is None:
            return
        folder = folder.parent / record.base
