"""Cut the part of a weights file that one rank holds into hashed blocks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

import msgspec

BLOCK_BYTES = 16 << 20
"""Largest block: the unit that is hashed, sent and checked."""
MAX_BLOCKS = 1 << 20
MAX_CONTENTS_BYTES = 128 << 20
"""Largest table of blocks in its encoded form: ``MAX_BLOCKS`` need less."""
_HASHING_THREADS = min(8, os.cpu_count() or 1)


class WeightBlock(msgspec.Struct, frozen=True, array_like=True):
    """Locate consecutive bytes of the weights file."""

    offset: int
    length: int
    digest: bytes
    """SHA-256."""


class Contents(msgspec.Struct, frozen=True, array_like=True):
    """Hold the table of a part. Written by a rank of the trainer, read by rollouts before the blocks."""

    blocks: list[WeightBlock]
    probe: bytes = b""
    """``probe.json``; of rank 0 only."""


@dataclass(frozen=True)
class WeightPart:
    """Hold a part in memory: its encoded table, and the bytes of each block in the table's order."""

    contents: bytes
    blocks: list[memoryview]

    @property
    def digest(self) -> str:
        """Return SHA-256 of the table, which contains the digests of all blocks."""
        return hashlib.sha256(self.contents).hexdigest()

    @classmethod
    def of(cls, pieces: Iterable[tuple[int, memoryview]], probe: bytes = b"") -> Self:
        """Cut pieces into blocks and hash them.

        Args:
            pieces: (offset in the file, bytes); they must not change as long as the part is offered.
            probe: the content of ``probe.json``.
        """
        cut = [
            (offset + start, piece[start : start + BLOCK_BYTES])
            for offset, piece in pieces
            for start in range(0, len(piece), BLOCK_BYTES)
        ]
        with ThreadPoolExecutor(_HASHING_THREADS) as threads:
            digests = list(threads.map(lambda each: hashlib.sha256(each[1]).digest(), cut))
        table = [WeightBlock(offset, len(view), digest) for (offset, view), digest in zip(cut, digests, strict=True)]
        return cls(msgspec.msgpack.encode(Contents(table, probe)), [view for _, view in cut])


def decode_contents(encoded: bytes, num_bytes: int) -> Contents:
    """Decode a part's table and check that its blocks lie within the file.

    Raises:
        ValueError: it is no table, or a block is too large or outside of the file.
    """
    try:
        contents = msgspec.msgpack.decode(encoded, type=Contents)
    except msgspec.MsgspecError as error:
        raise ValueError(f"no table of blocks: {error}") from error
    if len(contents.blocks) > MAX_BLOCKS:
        raise ValueError(f"the table has {len(contents.blocks):,} blocks; at most {MAX_BLOCKS:,} are allowed")
    for block in contents.blocks:
        if not 0 < block.length <= BLOCK_BYTES or block.offset < 0 or block.offset + block.length > num_bytes:
            raise ValueError(f"block at {block.offset} of {block.length} bytes: not within a file of {num_bytes} bytes")
    return contents


def covers_once(blocks: Iterable[WeightBlock], num_bytes: int) -> bool:
    """Return True if the blocks contain every byte of the file exactly once."""
    end = 0
    for block in sorted(blocks, key=lambda block: block.offset):
        if block.offset != end:
            return False
        end += block.length
    return end == num_bytes
