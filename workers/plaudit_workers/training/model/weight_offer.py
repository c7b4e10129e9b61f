"""Offer this rank's part of the weights to rollouts: copy it to the CPU → hash it → serve it.

No rank gathers anything: FSDP2 shards along the first dimension, so a shard is a run of consecutive bytes of the whole
tensor. Each rank holds its share of one copy of the weights in ``model.dtype`` in host memory, two during a change.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import chain

import msgspec
import torch
from torch import Tensor

from plaudit_wire.messages import PolicyVersion
from plaudit_workers.training.model.sharding import saved_rows
from plaudit_workers.weights.files import DTYPE_NAMES, bytes_of, host_copy
from plaudit_workers.weights.index import row_items
from plaudit_workers.weights.send import FileLayout, TensorParts, TensorShape, WeightPart, file_layout

PORT_VARIABLE = "PLAUDIT_WEIGHTS_PORT"
"""Port of local rank 0; the next ranks of the pod take the next ports. Unset: any free port."""
_WHOLE: Mapping[str, TensorParts] = {}


class WeightOffer(msgspec.Struct, frozen=True):
    """Command every rank to offer a version. Sent by rank 0."""

    version: PolicyVersion
    token: str
    redis_url: str
    """The ranks announce the address from which they reach this host."""
    probe: bytes
    """``probe.json``."""


def weights_port() -> int:
    """Return the port on which this rank offers its part; 0: any free one."""
    first = int(os.environ.get(PORT_VARIABLE, "0"))
    return first + int(os.environ.get("LOCAL_RANK", "0")) if first else 0


def shapes_of(
    tensors: Mapping[str, Tensor], dtype: torch.dtype, parts: Mapping[str, TensorParts] = _WHOLE
) -> list[TensorShape]:
    """Return the published tensors, the same on every rank.

    Args:
        parts: name of a tensor → its published parts, where they are not itself; see ``StoredParameters.published``.
    """
    return [
        TensorShape(name, DTYPE_NAMES[_published(tensor, dtype)], tuple(tensor.shape), parts.get(name, ()))
        for name, tensor in tensors.items()
    ]


def part_of(
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    rank: int,
    probe: bytes,
    parts: Mapping[str, TensorParts] = _WHOLE,
) -> WeightPart:
    """Copy this rank's part to the CPU and hash it; rank 0's has the header, the probe and what is not sharded."""
    layout = file_layout(shapes_of(tensors, dtype, parts))
    pieces = [(0, memoryview(layout.header))] if rank == 0 else []
    return WeightPart.of(chain(pieces, _pieces(tensors, dtype, rank, layout)), probe if rank == 0 else b"")


def _pieces(
    tensors: Mapping[str, Tensor], dtype: torch.dtype, rank: int, layout: FileLayout
) -> Iterator[tuple[int, memoryview]]:
    for name, rows, first_row in saved_rows(tensors, rank):
        copy = host_copy(rows, _published(rows, dtype))
        first = first_row * row_items(tensors[name].shape)
        yield layout.offsets[name] + first * copy.element_size(), bytes_of(copy)


def _published(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if tensor.is_floating_point() else tensor.dtype
