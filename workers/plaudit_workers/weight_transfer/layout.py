"""Lay out a model's tensors as the bytes of one safetensors file, of which each rank of the trainer holds a part."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "U8": 1, "I8": 1, "BOOL": 1}
"""Name of a type in safetensors → bytes of an element."""
_ALIGNMENT = 8
_LENGTH_BYTES = 8


TensorParts = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of tensors whose bytes follow each other."""


class TensorShape(NamedTuple):
    """Describe a whole tensor: its name, its type as safetensors names it (``BF16``), and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: TensorParts = ()
    """The tensors that a file has in its place, which consist of its bytes; empty: the tensor itself."""

    @property
    def num_bytes(self) -> int:
        """Return the size in bytes."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]

    @property
    def published(self) -> tuple[TensorShape, ...]:
        """Return the tensors that a file has in its place."""
        return tuple(TensorShape(name, self.dtype, shape) for name, shape in self.parts) or (self,)


@dataclass(frozen=True)
class FileLayout:
    """Hold the first bytes of the file and the position of each tensor."""

    header: bytes
    offsets: dict[str, int]
    """Tensor name → offset of its first byte in the file."""
    num_bytes: int
    """Size of the file."""


def file_layout(tensors: Iterable[TensorShape]) -> FileLayout:
    """Return the layout of a safetensors file with these tensors.

    Larger types come first, so every tensor is aligned to its elements. The layout depends only on the set of tensors:
    all ranks compute the same one.
    """
    ordered = sorted(tensors, key=lambda tensor: (-_ITEM_BYTES[tensor.dtype], tensor.name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for tensor in ordered:
        starts[tensor.name] = end
        for part in tensor.published:
            offsets = [end, end := end + part.num_bytes]
            entries[part.name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return FileLayout(header, {name: len(header) + start for name, start in starts.items()}, len(header) + end)
