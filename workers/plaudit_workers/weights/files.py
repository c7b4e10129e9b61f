"""Write and read tensors as safetensors files, hashed on the way: published weights, and the state of checkpoints.

``WeightFiles`` are the published weights, one file of each rank. ``write_rows`` and ``ShardReader`` write and read a
state, each rank its rows; ``write_converted`` makes one file of it, in another precision.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

import torch
from torch import Tensor

from plaudit_workers.weights.index import BLOCK_BYTES, ShardedTensor, ShardError, ShardIndex, Slice, row_items, rows_of
from plaudit_workers.weights.published import write_all, write_flushed
from plaudit_workers.weights.send import FileLayout, TensorParts, TensorShape, file_layout

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.bool: "BOOL",
}
"""Types of torch → their names in safetensors."""
DTYPES_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}
"""Names in safetensors → types of torch."""
_STAGED_BYTES = 64 << 20


def host_copy(rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a copy in host memory, in another type if one is given.

    From a GPU it goes through pinned memory, of which torch keeps the blocks. Straight to pageable memory an H100
    copied 1-5 GB/s, since one thread takes all page faults; this way 15-25.
    """
    copy = torch.empty(rows.shape, dtype=dtype or rows.dtype, device="cpu")
    if rows.device.type != "cuda":
        return copy.copy_(rows)
    source, target = (each.reshape(-1).view(torch.uint8) for each in (rows.to(copy.dtype), copy))
    for start in range(0, len(source), _STAGED_BYTES):
        piece = source[start : start + _STAGED_BYTES]
        staged = torch.empty(len(piece), dtype=torch.uint8, pin_memory=True).copy_(piece)
        target[start : start + len(piece)].copy_(staged)
    return copy


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without a copy; writing to them changes the tensor."""
    if not tensor.numel():
        return memoryview(bytearray())
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class WeightFile:
    """Hold one file of the published weights."""

    name: str
    tensors: tuple[TensorShape, ...]

    @property
    def layout(self) -> FileLayout:
        """Return the layout of the file."""
        return file_layout(self.tensors)


@dataclass(frozen=True)
class WeightFiles:
    """Plan the files of the published weights: file i is written by rank i. The same on every rank.

    Each rank writes whole tensors, balanced by their bytes. They are gathered one after the other, so no rank ever
    holds the whole model. With several files an index names the file of each tensor, as in every sharded model on the
    Hugging Face hub.
    """

    files: tuple[WeightFile, ...]
    """At most one for each rank, none of them empty."""

    @classmethod
    def plan(cls, tensors: Sequence[TensorShape], name: str, num_files: int) -> Self:
        """Distribute tensors over files: the largest first, each to the file that has the fewest bytes.

        Args:
            name: of the only file, such as ``model.safetensors``; several are ``model-00001-of-00008.safetensors`` …
            num_files: at most; fewer if there are fewer tensors.
        """
        shares: list[list[TensorShape]] = [[] for _ in range(max(1, min(num_files, len(tensors))))]
        sizes = [0] * len(shares)
        for tensor in sorted(tensors, key=lambda each: (-each.num_bytes, each.name)):
            least = min(range(len(shares)), key=lambda number: (sizes[number], len(shares[number])))
            shares[least].append(tensor)
            sizes[least] += tensor.num_bytes
        stem, _, suffix = name.rpartition(".")
        names = [f"{stem}-{number + 1:05d}-of-{len(shares):05d}.{suffix}" for number in range(len(shares))]
        used = names if len(shares) > 1 else [name]
        return cls(tuple(WeightFile(own, tuple(share)) for own, share in zip(used, shares, strict=True)))

    def write_own(self, folder: Path, rank: int, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
        """Write the file of this rank; every tensor is taken from ``tensors``, whether it is written here or not.

        Args:
            tensors: (published name, whole tensor) in the order of ``order``; taking one may be a collective call.

        Returns:
            The file's name with its SHA-256, hexadecimal; empty if this rank has no file.

        Raises:
            OSError: the disk is full, or the folder is missing. All tensors were taken before.
        """
        own = self.files[rank] if rank < len(self.files) else None
        if own is None:
            for _ in tensors:
                pass
            return {}
        dtypes = {tensor.name: DTYPES_BY_NAME[tensor.dtype] for tensor in own.tensors}
        with _HashedFile(folder / own.name, own.layout) as file:
            for name, tensor in tensors:
                if name in dtypes:
                    file.append(host_copy(tensor.detach(), dtypes[name]))
        return {own.name: file.digest}

    @property
    def order(self) -> list[str]:
        """Return the names of all tensors in the order in which they are gathered: that of each file's layout."""
        starts = {name: start for file in self.files for name, start in file.layout.offsets.items()}
        return sorted(starts, key=lambda name: (starts[name], name))

    def index(self) -> Mapping[str, bytes]:
        """Return the index file by its name; empty if there is one file only."""
        if len(self.files) == 1:
            return {}
        stem = self.files[0].name.partition("-")[0]
        weight_map = {
            part.name: file.name for file in self.files for tensor in file.tensors for part in tensor.published
        }
        total = sum(tensor.num_bytes for file in self.files for tensor in file.tensors)
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        return {f"{stem}.safetensors.index.json": json.dumps(content, indent=1).encode()}


class _HashedFile:
    """Write and hash a new file in a thread, while the caller gathers the next tensor."""

    def __init__(self, path: Path, layout: FileLayout) -> None:
        self._path = path
        self._header = layout.header
        self._hash = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, "weights-write")
        self._file: BinaryIO | None = None
        self._last: Future[None] = self._thread.submit(self._open)
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def append(self, tensor: Tensor) -> None:
        """Write a tensor; the one before is written first, so two are held at most. Errors are raised at the end."""
        self._wait()
        if self._error is None:
            self._last = self._thread.submit(self._write, bytes_of(tensor))

    def __exit__(self, *_: object) -> None:
        self._wait()
        if self._error is None:
            self._last = self._thread.submit(self._flush)
            self._wait()
        self._thread.shutdown()
        if self._file is not None:
            self._file.close()
        if self._error is not None:
            raise self._error

    @property
    def digest(self) -> str:
        """Return SHA-256 of the written bytes."""
        return self._hash.hexdigest()

    def _wait(self) -> None:
        self._error = self._error or self._last.exception()

    def _open(self) -> None:
        self._file = self._path.open("xb", buffering=0)
        self._write(memoryview(self._header))

    def _write(self, content: memoryview) -> None:
        assert self._file is not None
        for start in range(0, len(content), BLOCK_BYTES):
            block = content[start : start + BLOCK_BYTES]
            self._hash.update(block)
            write_all(self._file, block)

    def _flush(self) -> None:
        assert self._file is not None
        os.fsync(self._file.fileno())


class ShardReader:
    """Read rows of the state in a folder with ``policy.json``; only the blocks that hold them are read and checked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.index = ShardIndex.read(folder)
        self.read_bytes = 0
        """Bytes read from the files so far."""

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """Read rows ``first`` to ``first + count`` of a tensor.

        Raises:
            ShardError: there is no such tensor or row, or a file is damaged.
            OSError: a file cannot be read.
        """
        tensor = self._tensor(name)
        shape = (count, *tensor.shape[1:]) if tensor.shape else ()
        rows = torch.empty(shape, dtype=DTYPES_BY_NAME[tensor.dtype])
        row_bytes = row_items(tensor.shape) * rows.element_size()
        target, filled = bytes_of(rows), 0
        for part in tensor.slices:
            begin, end = max(first, part.first_row), min(first + count, part.end_row)
            if begin < end and row_bytes:
                start = (begin - first) * row_bytes
                length = (end - begin) * row_bytes
                self._read(part, name, row_bytes, (begin - part.first_row) * row_bytes, target[start : start + length])
            filled += max(0, end - begin)
        if filled != count:
            raise ShardError(f"{name} has no rows {first} to {first + count}")
        return rows

    def whole(self, name: str) -> Tensor:
        """Read a whole tensor; see ``rows``."""
        return self.rows(name, 0, self._tensor(name).num_rows)

    def _tensor(self, name: str) -> ShardedTensor:
        try:
            return self.index.tensors[name]
        except KeyError as error:
            raise ShardError(f"{name} is missing") from error

    def _read(self, part: Slice, name: str, row_bytes: int, start: int, target: memoryview) -> None:
        """Read the bytes of a slice from ``start`` on into ``target``, block by block."""
        size = part.num_rows * row_bytes
        if math.ceil(size / BLOCK_BYTES) != len(part.digests):
            raise ShardError(f"{name}: {len(part.digests)} digests for {size:,} bytes in {part.file}")
        with (self._folder / part.file).open("rb", buffering=0) as file:
            for number in range(start // BLOCK_BYTES, math.ceil((start + len(target)) / BLOCK_BYTES)):
                first, last = number * BLOCK_BYTES, min(size, (number + 1) * BLOCK_BYTES)
                begin, end = max(first, start), min(last, start + len(target))
                own = target[begin - start : end - start]
                block = own if (begin, end) == (first, last) else memoryview(bytearray(last - first))
                self._read_block(file, part, first, block)
                if hashlib.sha256(block).digest() != part.digests[number]:
                    raise ShardError(f"{part.file} is damaged at byte {part.offset + first:,} ({name})")
                if block is not own:
                    own[:] = block[begin - first : end - first]

    def _read_block(self, file: BinaryIO, part: Slice, start: int, block: memoryview) -> None:
        file.seek(part.offset + start)
        self.read_bytes += len(block)
        rest = block
        while rest:
            count = file.readinto(rest)  # type: ignore[attr-defined]
            if not count:
                raise ShardError(f"{part.file} is too short")
            rest = rest[count:]


def write_converted(
    path: Path, reader: ShardReader, names: Mapping[str, str], dtype: torch.dtype, parts: Mapping[str, TensorParts]
) -> None:
    """Write the tensors of a state as one file, holding one tensor at a time.

    Args:
        names: name in the file → name in the state.
        dtype: of floating-point tensors; others keep theirs.
        parts: name in the file → the tensors that it consists of, where they are not itself.

    Raises:
        ShardError: a tensor is missing or damaged.
        OSError: a file cannot be read, or the disk is full.
    """
    stored = reader.index.tensors
    own = {name: DTYPES_BY_NAME[stored[source].dtype] for name, source in names.items()}
    dtypes = {name: dtype if each.is_floating_point else each for name, each in own.items()}
    layout = file_layout(
        TensorShape(name, DTYPE_NAMES[dtypes[name]], stored[source].shape, parts.get(name, ()))
        for name, source in names.items()
    )
    ordered = sorted(names, key=layout.offsets.__getitem__)
    tensors = (bytes_of(reader.whole(names[name]).to(dtypes[name])) for name in ordered)
    write_flushed(path, itertools.chain([layout.header], tensors))


class TensorRows(NamedTuple):
    """Hold consecutive rows of a tensor."""

    name: str
    rows: Tensor
    """On the CPU, contiguous."""
    first_row: int
    shape: tuple[int, ...]
    """Of the whole tensor."""


def write_rows(path: Path, parts: Sequence[TensorRows]) -> dict[str, ShardedTensor]:
    """Write one file and flush it to the disk; return each tensor with its slice in this file.

    Args:
        parts: at most one for each tensor.
    """
    layout = file_layout(TensorShape(part.name, DTYPE_NAMES[part.rows.dtype], tuple(part.rows.shape)) for part in parts)
    written: dict[str, ShardedTensor] = {}
    with path.open("xb", buffering=0) as file:
        write_all(file, memoryview(layout.header))
        for part in sorted(parts, key=lambda part: layout.offsets[part.name]):
            digests = list(_write_hashed(file, bytes_of(part.rows)))
            own = Slice(path.name, layout.offsets[part.name], part.first_row, rows_of(tuple(part.rows.shape)), digests)
            written[part.name] = ShardedTensor(DTYPE_NAMES[part.rows.dtype], part.shape, [own])
        os.fsync(file.fileno())
    return written


def _write_hashed(file: BinaryIO, content: memoryview) -> Iterator[bytes]:
    for start in range(0, len(content), BLOCK_BYTES):
        block = content[start : start + BLOCK_BYTES]
        write_all(file, block)
        yield hashlib.sha256(block).digest()
