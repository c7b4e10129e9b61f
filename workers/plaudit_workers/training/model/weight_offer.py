"""Offer this rank's part of the weights to rollouts: copy it to the CPU → hash it → serve it.

No rank gathers anything: FSDP2 shards along the first dimension, so a shard is a run of consecutive bytes of the whole
tensor. Each rank holds its share of one copy of the weights in ``model.dtype`` in host memory, two during a change.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from plaudit_wire.messages import PolicyVersion
from plaudit_workers.weight_transfer.layout import FileLayout, TensorShape, file_layout
from plaudit_workers.weight_transfer.part import WeightPart
from plaudit_workers.weight_transfer.server import WeightServer, host_towards

PORT_VARIABLE = "PLAUDIT_WEIGHTS_PORT"
"""Port of local rank 0; the next ranks of the pod take the next ports. Unset: any free port."""

_DTYPE_NAMES = {
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


class WeightOffer(msgspec.Struct, frozen=True):
    """The command to offer a version. Sent by rank 0, carried out on every rank."""

    version: PolicyVersion
    token: str
    redis_url: str
    """The ranks announce the address from which they reach this host."""
    probe: bytes
    """``probe.json``."""


class OfferedWeights:
    """The part of one rank that is offered now."""

    def __init__(self) -> None:
        self._server = WeightServer(_port())

    def replace(self, offer: WeightOffer, part: WeightPart) -> str:
        """Offer another version; return this rank's address."""
        self._server.offer(offer.version, offer.token, part)
        return f"{host_towards(offer.redis_url)}:{self._server.port}"

    def close(self) -> None:
        """Offer nothing any more."""
        self._server.close()


def _port() -> int:
    first = int(os.environ.get(PORT_VARIABLE, "0"))
    return first + int(os.environ.get("LOCAL_RANK", "0")) if first else 0


def layout_of(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> FileLayout:
    """Return the layout of the file of these tensors, the same on every rank.

    Args:
        tensors: by their published names; sharded or whole.
        dtype: of the published floating-point tensors.
    """
    return file_layout(
        TensorShape(name, _DTYPE_NAMES[_published(tensor, dtype)], tuple(tensor.shape))
        for name, tensor in tensors.items()
    )


def part_of(tensors: Mapping[str, Tensor], dtype: torch.dtype, rank: int, probe: bytes) -> WeightPart:
    """Copy this rank's part of the tensors to the CPU and hash it.

    Args:
        tensors: as for ``layout_of``.
        dtype: as for ``layout_of``.
        rank: 0 also offers the header, the probe and what is not sharded.
        probe: ``probe.json``.
    """
    layout = layout_of(tensors, dtype)
    pieces = [(0, memoryview(layout.header))] if rank == 0 else []
    return WeightPart.of([*pieces, *_pieces(tensors, dtype, rank, layout)], probe if rank == 0 else b"")


def _pieces(
    tensors: Mapping[str, Tensor], dtype: torch.dtype, rank: int, layout: FileLayout
) -> Iterator[tuple[int, memoryview]]:
    for name, tensor in tensors.items():
        local, first = _local(tensor, rank)
        if local is None or not local.numel():
            continue
        copy = torch.empty(local.shape, dtype=_published(tensor, dtype), device="cpu").copy_(local.detach())
        content = copy.view(-1).view(torch.uint8).numpy()
        yield layout.offsets[name] + first * copy.element_size(), content.data


def _local(tensor: Tensor, rank: int) -> tuple[Tensor | None, int]:
    """Return this rank's elements, None if another rank sends them, and the number of elements before them."""
    if not isinstance(tensor, DTensor):
        return (tensor if rank == 0 else None), 0
    if tensor.placements != (Shard(0),):
        raise NotImplementedError(f"weights sharded as {tensor.placements}; only Shard(0), as by fully_shard, is sent")
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), int(offsets[0]) * (tensor.numel() // max(1, tensor.shape[0]))


def _published(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if tensor.is_floating_point() else tensor.dtype
