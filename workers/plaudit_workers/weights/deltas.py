"""Encode the changed elements of weights, and restore whole weight files from older ones and the deltas between them.

With ``trainer.weights.fullEvery`` above 1, a folder of published weights holds, besides ``probe.json``:

- ``delta.json`` and, for each weight file, ``NAME.delta`` with what changed since the version before; or
- the weight files whole; or both, so that rollouts that hold the version before need not read the whole ones.

Reinforcement learning's steps are so small that about 99 % of bfloat16 weights keep their bits in a step (Miahi and
Belilovsky 2026, arXiv 2602.03839). Bits are compared and copied, never numbers: -0.0 and NaNs come out as they went in,
and nothing is added up.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import msgspec
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from plaudit_workers.weights.published import digest_files, is_whole, write_all

Bits = NDArray[np.unsignedinteger[Any]]
"""A tensor's elements as unsigned integers of their size."""
_GAP_DTYPES: tuple[type[np.unsignedinteger[Any]], ...] = (np.uint8, np.uint16)
_BITS: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_GAPS, _VALUES = ".gaps", ".values"
DELTA_FILE = "delta.json"
DELTA_SUFFIX = ".delta"
_BLOCK_BYTES = 4 << 20
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 << 20
"""Of safetensors itself."""


class DeltaError(Exception):
    """Report that a delta is damaged, belongs to other weights, or a version that it needs is missing."""


class TensorDelta(NamedTuple):
    """Hold the changed elements of one tensor: positions as gaps, values as raw bits.

    Position i is the sum of the gaps up to i, minus 1. A gap has one or two bytes, whichever makes the tensor's delta
    smaller; one that does not fit is bridged by unchanged elements.
    """

    gaps: Bits
    """[N] of one or two bytes: distance from the position before; that of the first from -1."""
    values: Bits
    """[N] new elements."""

    @classmethod
    def between(cls, old: Bits, new: Bits) -> Self | None:
        """Return the elements in which two arrays [M] differ; None if they are equal."""
        changed = np.flatnonzero(old != new)
        if not changed.size:
            return None
        choices = (_gaps(changed, dtype) for dtype in _GAP_DTYPES)
        gaps = min(choices, key=lambda each: each.size * (each.itemsize + new.itemsize))
        return cls(gaps, new[_positions(gaps)])

    @property
    def num_bytes(self) -> int:
        """Return the size without names."""
        return self.gaps.nbytes + self.values.nbytes

    def patch(self, num_elements: int, item_bytes: int) -> TensorPatch:
        """Return the changes by position; raise ``DeltaError`` for a tensor of another size or type."""
        positions = _positions(self.gaps)
        fits = self.values.itemsize == item_bytes and self.values.shape == positions.shape and positions.size
        if not fits or positions[0] < 0 or positions[-1] >= num_elements:
            raise DeltaError("the delta does not fit its tensor")
        return TensorPatch(positions, self.values)


class TensorPatch(NamedTuple):
    """Hold the changes of a tensor by position, to be applied a block at a time."""

    positions: NDArray[np.int64]
    """[N], ascending."""
    values: Bits
    """[N] new elements."""

    def apply(self, block: Bits, first: int = 0) -> bool:
        """Change a block of the tensor, from position ``first``, in place; return False if nothing in it changes."""
        start, end = np.searchsorted(self.positions, (first, first + block.size))
        block[self.positions[start:end] - first] = self.values[start:end]
        return bool(start < end)


def _positions(gaps: Bits) -> NDArray[np.int64]:
    return np.cumsum(gaps, dtype=np.int64) - 1


def _gaps(changed: NDArray[np.intp], dtype: type[np.unsignedinteger[Any]]) -> Bits:
    """Return the gaps between positions, with unchanged elements in those that are too wide."""
    widest = int(np.iinfo(dtype).max)
    steps = np.diff(changed, prepend=-1)
    bridges = (steps - 1) // widest
    gaps = np.full(changed.size + int(bridges.sum()), widest, dtype=dtype)
    gaps[np.cumsum(bridges + 1) - 1] = steps - bridges * widest
    return gaps


def as_bits(content: memoryview | bytearray | NDArray[np.uint8], item_bytes: int) -> Bits:
    """View bytes as unsigned integers, without a copy."""
    return np.frombuffer(content, dtype=_BITS[item_bytes])


def encode_deltas(deltas: Mapping[str, TensorDelta]) -> bytes:
    """Encode the deltas of a file's tensors, by name, as safetensors: ``NAME.gaps`` and ``NAME.values``."""
    gaps = {f"{name}{_GAPS}": delta.gaps for name, delta in deltas.items()}
    return safetensors.numpy.save(gaps | {f"{name}{_VALUES}": delta.values for name, delta in deltas.items()})


def read_deltas(path: Path) -> dict[str, TensorDelta]:
    """Read what ``encode_deltas`` encoded; raise ``DeltaError`` if the file is damaged."""
    try:
        parts = safetensors.numpy.load(path.read_bytes())
        names = [part.removesuffix(_GAPS) for part in parts if part.endswith(_GAPS)]
        return {name: TensorDelta(parts[f"{name}{_GAPS}"], parts[f"{name}{_VALUES}"]) for name in names}
    except (SafetensorError, KeyError, ValueError) as error:
        raise DeltaError(f"{path} is no delta: {error!r}") from error


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


def is_delta_only(folder: Path) -> bool:
    """Return True if the folder holds no whole files, but a delta from which they can be restored."""
    return (folder / DELTA_FILE).exists() and not is_whole(folder)


def read_record(folder: Path) -> DeltaRecord | None:
    """Return the folder's record; None if it has no delta, or does not exist. Raise ``DeltaError`` if it is damaged."""
    path = folder / DELTA_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=DeltaRecord)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except msgspec.MsgspecError as error:
        raise DeltaError(f"{path} is damaged: {error}") from error


def chain_from_held(folder: Path, held: str) -> DeltaChain | None:
    """Return the chain from a version that is held to the folder's, None if there is none; raise as ``read_record``."""
    return _chain(folder, lambda each: each.name == held)


def chain_from_whole(folder: Path) -> DeltaChain:
    """Return the chain to the folder's version from the nearest whole one; raise ``DeltaError`` if there is none."""
    chain = _chain(folder, is_whole)
    if chain is None:
        raise DeltaError(f"no whole version leads to {folder}")
    return chain


def _chain(folder: Path, starts_at: Callable[[Path], bool]) -> DeltaChain | None:
    newest_first: dict[str, Path] = {}
    while folder.name not in newest_first:
        if starts_at(folder):  # it may not exist
            return DeltaChain(folder, [*newest_first.values()][::-1])
        newest_first[folder.name] = folder
        record = read_record(folder)
        if record is None:
            return None
        folder = folder.parent / record.base
    return None


class _Tensor(NamedTuple):
    name: str
    num_bytes: int
    item_bytes: int


def restore(start: Path, deltas: Sequence[Path], target: Path) -> str:
    """Write the weight files of the version to which the deltas lead; return their ``combined_digest``.

    Each file is read, changed, hashed and written block by block in one pass, several files at once.

    Args:
        start: folder with whole weight files.
        deltas: folders, the oldest first; the first one rests on ``start``.
        target: folder for the files; ``start`` itself is changed in place, and damaged if this raises.

    Raises:
        OSError: a file is missing, or the disk is full.
        DeltaError: a delta does not fit.
    """
    return digest_files(start, partial(_restore_file, deltas=deltas, target=target))


def restore_version(folder: Path, target: Path) -> None:
    """Write the whole weights of a published version, with configuration and tokenizer, into an empty folder.

    Raises:
        OSError: a file is missing, or the disk is full.
        DeltaError: a delta or a version that it rests on is damaged or missing.
    """
    chain, record = chain_from_whole(folder), read_record(folder)
    digest = restore(chain.start, chain.deltas, target)
    if record is not None and digest != record.digest:
        raise DeltaError(f"the restored files have digest {digest}, {folder / DELTA_FILE} names {record.digest}")
    copy_companions(chain.start, target)
    copy_companions(folder, target)


def copy_companions(source: Path, target: Path) -> None:
    """Copy what lies beside the weights: configuration, tokenizer, index, probe."""
    for path in source.iterdir():
        if path.suffix not in (".safetensors", DELTA_SUFFIX) and path.name != DELTA_FILE:
            shutil.copyfile(path, target / path.name)


def _restore_file(path: Path, deltas: Sequence[Path], target: Path) -> str:
    changes = [read_deltas(folder / f"{path.name}{DELTA_SUFFIX}") for folder in deltas]
    in_place = path.parent == target
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb") as source, (target / path.name).open("r+b" if in_place else "wb", buffering=0) as file:
        header, tensors = _read_header(source)
        digest.update(header)
        if not in_place:
            write_all(file, memoryview(header))
        for tensor in tensors:
            patches = _patches(tensor, changes)
            for start in range(0, tensor.num_bytes, _BLOCK_BYTES):
                block = buffer[: min(_BLOCK_BYTES, tensor.num_bytes - start)]
                at = source.tell()
                if source.readinto(block) != len(block):
                    raise DeltaError(f"{path} is shorter than its header says")
                elements = as_bits(block, tensor.item_bytes)
                changed = [patch.apply(elements, start // tensor.item_bytes) for patch in patches]
                digest.update(block)
                if any(changed) or not in_place:
                    file.seek(at)
                    write_all(file, block)
    return digest.hexdigest()


def _patches(tensor: _Tensor, changes: Sequence[Mapping[str, TensorDelta]]) -> list[TensorPatch]:
    own = [each[tensor.name] for each in changes if tensor.name in each]
    try:
        return [delta.patch(tensor.num_bytes // tensor.item_bytes, tensor.item_bytes) for delta in own]
    except DeltaError as error:
        raise DeltaError(f"{tensor.name}: {error}") from error


def _read_header(source: BinaryIO) -> tuple[bytes, list[_Tensor]]:
    """Return the first bytes of a safetensors file, and its tensors in the order of their bytes."""
    length = source.read(_LENGTH_BYTES)
    num_bytes = int.from_bytes(length, "little")
    if len(length) < _LENGTH_BYTES or num_bytes > _MAX_HEADER_BYTES:
        raise DeltaError(f"{source.name} is no safetensors file")
    text = source.read(num_bytes)
    try:
        entries = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        ordered = sorted(entries.items(), key=lambda item: tuple(item[1]["data_offsets"]))
        tensors = [_tensor(name, entry["data_offsets"], entry["shape"]) for name, entry in ordered]
    except (ValueError, KeyError, TypeError) as error:
        raise DeltaError(f"{source.name} has a damaged header: {error!r}") from error
    return length + text, tensors


def _tensor(name: str, offsets: Sequence[int], shape: Sequence[int]) -> _Tensor:
    start, end = offsets
    return _Tensor(name, end - start, (end - start) // max(1, math.prod(shape)) or 1)
