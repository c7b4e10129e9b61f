"""Write a rank's rows of tensors to a safetensors file, and hash them on the way."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from torch import Tensor

from plaudit_workers.training.shards.index import BLOCK_BYTES, ShardedTensor, Slice, rows_of
from plaudit_workers.training.shards.tensor_bytes import DTYPE_NAMES, bytes_of
from plaudit_workers.weight_transfer.layout import TensorShape, file_layout


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

    Raises:
        OSError: the disk is full, or the folder is missing.
    """
    layout = file_layout(TensorShape(part.name, DTYPE_NAMES[part.rows.dtype], tuple(part.rows.shape)) for part in parts)
    written: dict[str, ShardedTensor] = {}
    with path.open("xb", buffering=0) as file:
        _write(file, memoryview(layout.header))
        for part in sorted(parts, key=lambda part: layout.offsets[part.name]):
            digests = list(_write_hashed(file, bytes_of(part.rows)))
            own = Slice(path.name, layout.offsets[part.name], part.first_row, rows_of(tuple(part.rows.shape)), digests)
            written[part.name] = ShardedTensor(DTYPE_NAMES[part.rows.dtype], part.shape, [own])
        os.fsync(file.fileno())
    return written


def _write_hashed(file: BinaryIO, content: memoryview) -> Iterator[bytes]:
    for start in range(0, len(content), BLOCK_BYTES):
        block = content[start : start + BLOCK_BYTES]
        _write(file, block)
        yield hashlib.sha256(block).digest()


def _write(file: BinaryIO, content: memoryview) -> None:
    while content:  # an unbuffered write may be short
        content = content[file.write(content) :]
