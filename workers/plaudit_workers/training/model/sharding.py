"""Place parameters: whole in one process, or sharded over ranks by FSDP2 (``fully_shard``).

With ``trainer.fsdpSize`` the ranks are replicas of so many consecutive ones, and parameters are sharded within each
(hybrid sharding, HSDP). Everything else of the trainer treats all of these alike through ``gathered`` (parameters or
optimizer tensors unsharded) and ``fill`` (the way back), or through ``own_rows`` and ``saved_rows``. A saved state does
not depend on the number of ranks, so a run may be resumed with another number.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

COMMAND_TIMEOUT = timedelta(days=30)
"""Ranks other than 0 wait this long for the next command: rewards may be slow and jobs suspended."""
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Within a command all ranks work; a rank that is later is considered dead, and the processes end."""


@dataclass(frozen=True)
class Ranks:
    """Hold this process's place among the trainer's processes."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh | None = None
    """Parameters are sharded over its last dimension and replicated over the one before; None with one rank."""
    commands: dist.ProcessGroup | None = None
    """Carries commands from rank 0 to the others; None with one rank."""
    saving: dist.ProcessGroup | None = None
    """Used by the threads that write checkpoints, beside commands; None with one rank."""
    sequence: dist.ProcessGroup | None = None
    """The consecutive ranks that compute the same rows together; None where each computes its own."""
    sequence_size: int = 1
    """Number of those."""

    def use_device(self) -> None:
        """Make the device the current one of the calling thread: CUDA has one for each thread, 0 in a new one."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def finish_passes(self) -> None:
        """Wait until the device has computed all passes that were started."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def sum(self, values: Tensor) -> Tensor:
        """Sum float64[N] over the rows of all ranks; every rank gets the sum.

        Ranks that compute the same rows together all have their values, which count once.
        """
        if self.rank % self.sequence_size:
            values = torch.zeros_like(values)
        if self.world_size > 1:
            dist.all_reduce(values)
        return values


def join_ranks(rank: int, world_size: int, fsdp_size: int | None = None, sequence_size: int = 1) -> Ranks:
    """Choose this process's device and, with more than one rank, join the process group.

    Reads ``LOCAL_RANK`` (default: ``rank``) and, for the process group, ``MASTER_ADDR`` and ``MASTER_PORT``.

    Args:
        fsdp_size: ``trainer.fsdpSize``, a divisor of ``world_size``; None: all ranks.
        sequence_size: ``trainer.sequenceParallelSize``, a divisor of ``world_size``.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if world_size == 1:
        return Ranks(rank, world_size, device)
    # Commands and plain figures travel by gloo; on GPUs the gradients go by nccl.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
    commands, saving = (dist.new_group(backend="gloo", timeout=COMMAND_TIMEOUT) for _ in range(2))
    mesh = _mesh(device, world_size, fsdp_size or world_size)
    sequence = _group_of(torch.arange(world_size).view(-1, sequence_size).tolist()) if sequence_size > 1 else None
    return Ranks(rank, world_size, device, mesh, commands, saving, sequence, sequence_size)


def _mesh(device: torch.device, world_size: int, fsdp_size: int) -> DeviceMesh:
    if fsdp_size == world_size:
        return init_device_mesh(device.type, (world_size,))
    places = torch.arange(world_size).view(-1, fsdp_size)  # one replica a row
    groups = [_group_of(places.T.tolist()), _group_of(places.tolist())]
    return DeviceMesh.from_group(groups, device.type, places, mesh_dim_names=("replicate", "shard"))


def _group_of(members: list[list[int]]) -> dist.ProcessGroup:
    """Return this rank's process group of ``members``, the ranks of each group. A collective call of all ranks."""
    own, _ = dist.new_subgroups_by_enumeration(members, timeout=COLLECTIVE_TIMEOUT)  # type: ignore[no-untyped-call]
    assert isinstance(own, dist.ProcessGroup)
    return own


def leave_ranks(ranks: Ranks) -> None:
    """Leave the process group."""
    if ranks.world_size > 1:
        dist.destroy_process_group()


def place(model: PreTrainedModel, ranks: Ranks, dtype: torch.dtype, *, cpu_offload: bool = False) -> PreTrainedModel:
    """Move a model to the rank's device and, with more than one rank, shard it layer by layer.

    Args:
        model: on the CPU or, wholly or in part, on the meta device; see ``fill_shards``.
        dtype: precision of the forward passes; gradients are summed in float32.
        cpu_offload: with several ranks, hold shards and their gradients in host memory, pinned for GPUs; what is
            gathered for a layer lies on the device.
    """
    if ranks.world_size == 1:
        for tensor in chain(model.parameters(), model.buffers()):
            if not tensor.is_meta:
                tensor.data = tensor.data.to(ranks.device)
        return model
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    on_host = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda") if cpu_offload else OffloadPolicy()
    for module in _layers(model):
        fully_shard(module, mesh=ranks.mesh, mp_policy=precision, offload_policy=on_host)
    # The root, too, frees gathered parameters after a pass without gradients; it would continue with stale ones.
    fully_shard(model, mesh=ranks.mesh, mp_policy=precision, reshard_after_forward=True, offload_policy=on_host)
    return model


def sum_over_replicas(model: PreTrainedModel, wanted: bool) -> None:
    """Choose whether the next backward pass sums the gradients over the replicas; only an update's last one needs to.

    Nothing changes without replicas: gradients are always summed over the ranks of one.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(wanted)


def _layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the modules that the model names as not to be split; of nested ones the outer."""
    chosen: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():
        nested = any(name.startswith(f"{outer}.") for outer in chosen)
        if type(module).__name__ in (model._no_split_modules or ()) and not nested:
            chosen[name] = module
    return list(chosen.values())


def fill_shards(model: PreTrainedModel, device: torch.device, read: Callable[[str, int, int], Tensor]) -> None:
    """Give a model its parameters that are on the meta device; each rank reads and holds its own rows only.

    Args:
        model: placed by ``place``; its buffers are real.
        read: returns rows of a parameter or stored buffer by its name, the first row and their number.
    """
    made: dict[int, torch.nn.Parameter] = {}
    state: dict[str, torch.nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.is_meta:
            continue
        if id(parameter) not in made:
            made[id(parameter)] = _with_rows(parameter, device, partial(read, name))
        state[name] = made[id(parameter)]
    model.load_state_dict(state, strict=False, assign=True)  # FSDP2 keeps its own references up to date by a hook
    for name, buffer in saved_buffers(model).items():
        buffer.copy_(read(name, 0, buffer.shape[0] if buffer.dim() else 1))


def saved_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the buffers that are part of a model's state, by name."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def _with_rows(
    parameter: torch.nn.Parameter, device: torch.device, read: Callable[[int, int], Tensor]
) -> torch.nn.Parameter:
    empty, first = own_rows(parameter)
    rows = torch.empty(empty.shape, dtype=parameter.dtype, device=device)
    if rows.numel():
        rows.copy_(read(first, rows.shape[0] if rows.dim() else 1))
    if not isinstance(parameter, DTensor):
        return torch.nn.Parameter(rows, requires_grad=parameter.requires_grad)
    sharded = DTensor.from_local(
        rows,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return torch.nn.Parameter(sharded, requires_grad=parameter.requires_grad)


def own_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Return this rank's rows of a tensor, as a view, and the number of the first.

    FSDP2 shards along the first dimension, so a shard is a run of consecutive bytes of the whole tensor. A tensor that
    is not sharded is whole on every rank.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach(), 0
    if tensor.placements not in ((Shard(0),), (Replicate(), Shard(0))):
        raise NotImplementedError(f"a tensor sharded as {tensor.placements}; fully_shard makes Shard(0)")
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    with torch.no_grad():
        return tensor.to_local().detach(), int(offsets[0])


def saved_rows(tensors: Mapping[str, Tensor], rank: int) -> Iterator[tuple[str, Tensor, int]]:
    """Yield the rows that this rank saves of a state: its name, the rows as a view, and the number of the first.

    Each row is saved by one rank: replicas share the rows that they all hold, and rank 0 saves what is not sharded.
    Tensors of which this rank saves nothing are left out.
    """
    for name, tensor in tensors.items():
        rows, first = own_rows(tensor)
        if isinstance(tensor, DTensor):
            rows, first = _share_of_replica(tensor.device_mesh, rows, first)
        if rank == 0 or (isinstance(tensor, DTensor) and rows.numel()):
            yield name, rows, first


def _share_of_replica(mesh: DeviceMesh, rows: Tensor, first: int) -> tuple[Tensor, int]:
    if mesh.ndim == 1:
        return rows, first
    replica, num_replicas = mesh.get_local_rank(0), mesh.size(0)
    bounds = [rows.shape[0] * number // num_replicas for number in (replica, replica + 1)]
    return rows[bounds[0] : bounds[1]], first + bounds[0]


def gather_bytes(message: bytes, world_size: int, group: dist.ProcessGroup | None) -> list[bytes]:
    """Return the message of each rank, of any length. A collective call in ``group``."""
    if world_size == 1:
        return [message]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(sizes, torch.tensor([len(message)]), group=group)
    longest = max(1, *(int(size) for size in sizes))
    own = torch.frombuffer(bytearray(message.ljust(longest, b"\0")), dtype=torch.uint8)
    gathered = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(gathered, own, group=group)
    return [each[: int(size)].numpy().tobytes() for each, size in zip(gathered, sizes, strict=True)]


def _unsharded(tensor: Tensor) -> Tensor:
    """Gather a tensor on the mesh's device, also from shards in host memory. A collective call if it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    on_device = tensor.to(tensor.device_mesh.device_type)
    assert isinstance(on_device, DTensor)
    return on_device.full_tensor()


def gathered(tensors: Mapping[str, Tensor], order: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor unsharded, on its device, with its name. Taking one is a collective call if it is sharded.

    Args:
        tensors: the same on every rank.
        order: of the names, the same on every rank.
    """
    for name in order:
        yield name, _unsharded(tensors[name].detach())


def fill(tensor: Tensor, full: Tensor | None) -> None:
    """Write an unsharded tensor into a parameter or optimizer tensor. A collective call if it is sharded.

    Args:
        full: same shape; read on rank 0 only, None on the others.
    """
    source = torch.empty(tensor.shape, dtype=tensor.dtype) if full is None else full.to(tensor.dtype)
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            source = distribute_tensor(source.to(tensor.device), tensor.device_mesh, tensor.placements)
        tensor.copy_(source)
