"""Encode the changed elements of a tensor, and apply them: positions as gaps, values as raw bits.

Reinforcement learning's steps are so small that about 99 % of bfloat16 weights keep their bits in a step (Miahi and
Belilovsky 2026, arXiv 2602.03839). Bits are compared and copied, never numbers: -0.0 and NaNs come out as they went in,
and nothing is added up.

Position i is the sum of the gaps up to i, minus 1. A gap has one or two bytes, whichever makes the tensor's delta
smaller; one that does not fit is bridged by unchanged elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

Bits = NDArray[np.unsignedinteger[Any]]
"""A tensor's elements as unsigned integers of their size."""

_GAP_DTYPES: tuple[type[np.unsignedinteger[Any]], ...] = (np.uint8, np.uint16)
_BITS: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_GAPS, _VALUES = ".gaps", ".values"


class DeltaError(Exception):
    """Report that a delta is damaged, belongs to other weights, or a version that it needs is missing."""


class TensorDelta(NamedTuple):
    """Hold the changed elements of one tensor."""

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
        """Return the changes of a tensor by position.

        Raises:
            DeltaError: the delta is not one of a tensor of this size and type.
        """
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
        """Change a block of the tensor in place; return False if nothing in it changes.

        Args:
            first: position of the block's first element.
        """
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
    return safetensors.numpy.save(dict(_parts(deltas)))


def _parts(deltas: Mapping[str, TensorDelta]) -> Iterator[tuple[str, Bits]]:
    for name, delta in deltas.items():
        yield f"{name}{_GAPS}", delta.gaps
        yield f"{name}{_VALUES}", delta.values


def read_deltas(path: Path) -> dict[str, TensorDelta]:
    """Read what ``encode_deltas`` encoded.

    Raises:
        OSError: the file cannot be read.
        DeltaError: it is damaged.
    """
    try:
        parts = safetensors.numpy.load(path.read_bytes())
        names = [part.removesuffix(_GAPS) for part in parts if part.endswith(_GAPS)]
        return {name: TensorDelta(parts[f"{name}{_GAPS}"], parts[f"{name}{_VALUES}"]) for name in names}
    except (SafetensorError, KeyError, ValueError) as error:
        raise DeltaError(f"{path} is no delta: {error!r}") from error
