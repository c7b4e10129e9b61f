"""Describe a state that is spread over several files: which rows of which tensor lie where, and their digests.

Written by rank 0 as ``policy.json`` beside the ranks' files; read by every rank that loads the state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

INDEX_FILE = "policy.json"
MODEL_PREFIX = "model/"
"""Before the names of trained weights; those of AdamW's averages begin with ``exp_avg/`` and ``exp_avg_sq/``."""
PROXIMAL_PREFIX = "proximal/"
"""Before the names of the weights from before the first update of the step, if the state is of a step's middle."""
BLOCK_BYTES = 16 << 20
"""Largest part of a slice that has a digest of its own: a reader of a few rows checks only their blocks."""


class ShardError(ValueError):
    """Report that files of a state are missing, damaged, or do not fit together."""


class Slice(msgspec.Struct, frozen=True):
    """Locate consecutive rows of a tensor in one file; a tensor without dimensions is one row."""

    file: str
    offset: int
    """Of its first byte in the file."""
    first_row: int
    num_rows: int
    digests: list[bytes]
    """SHA-256 of each block of ``BLOCK_BYTES``, the last one shorter."""

    @property
    def end_row(self) -> int:
        """Return the row behind the last one."""
        return self.first_row + self.num_rows


class ShardedTensor(msgspec.Struct, frozen=True):
    """Describe a whole tensor and the slices that it consists of."""

    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]
    slices: list[Slice]

    @property
    def num_rows(self) -> int:
        """Return the size along the first dimension."""
        return rows_of(self.shape)


class StateProgress(msgspec.Struct, frozen=True):
    """Hold the part of a state that every rank needs."""

    random_state: bytes
    """Of torch's generator on the CPU."""
    updates: int
    """Updates computed so far."""
    steps: dict[str, int]
    """Parameter name → updates applied to it."""
    place: str = ""
    """Steps of the run before the next update, a fraction such as ``9/4``; empty in states of earlier versions."""


class ShardIndex(msgspec.Struct, frozen=True):
    """Hold the content of ``policy.json``."""

    progress: StateProgress
    tensors: dict[str, ShardedTensor]

    @classmethod
    def read(cls, folder: Path) -> ShardIndex:
        """Read the index of a folder; raise ``ShardError`` if it is damaged."""
        try:
            return msgspec.json.decode((folder / INDEX_FILE).read_bytes(), type=cls)
        except msgspec.MsgspecError as error:
            raise ShardError(f"{INDEX_FILE} is damaged: {error}") from error

    def encoded(self) -> bytes:
        """Return the content of ``policy.json``."""
        return msgspec.json.encode(self)


def rows_of(shape: Sequence[int]) -> int:
    """Return the size along the first dimension; 1 for a tensor without dimensions."""
    return shape[0] if shape else 1


def row_items(shape: Sequence[int]) -> int:
    """Return the elements of one row."""
    return math.prod(shape[1:])


def merged(parts: Iterable[dict[str, ShardedTensor]]) -> dict[str, ShardedTensor]:
    """Put the slices of all ranks together; raise ``ShardError`` unless they cover each row once."""
    tensors: dict[str, ShardedTensor] = {}
    for part in parts:
        for name, own in part.items():
            slices = [*(tensors[name].slices if name in tensors else ()), *own.slices]
            tensors[name] = ShardedTensor(own.dtype, own.shape, sorted(slices, key=lambda each: each.first_row))
    for name, tensor in tensors.items():
        end = 0
        for each in tensor.slices:
            if each.first_row != end:
                raise ShardError(f"{name}: rows {end} to {each.first_row} are missing or written twice")
            end = each.end_row
        if end != tensor.num_rows:
            raise ShardError(f"{name}: {end} of {tensor.num_rows} rows were written")
    return tensors
