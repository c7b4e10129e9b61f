"""Read rows of tensors from the files of a state; only the blocks that contain them are read and checked."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from plaudit_workers.training.shards.index import BLOCK_BYTES, ShardedTensor, ShardError, ShardIndex, Slice, row_items
from plaudit_workers.training.shards.tensor_bytes import DTYPES_BY_NAME, bytes_of


class ShardReader:
    """Read the state in a folder with ``policy.json``.

    Raises:
        ShardError: the index is damaged.
        OSError: it cannot be read.
    """

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
