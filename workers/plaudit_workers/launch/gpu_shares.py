"""Share the GPUs of one machine among processes that request more than there are. Pure.

Ray places processes that request one GPU by fractions of it. Engines of several GPUs cannot have fractions; if they
take turns with the trainer, devices are assigned here and hidden from Ray.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from plaudit_wire.errors import RefusedError
from plaudit_workers.launch.plan import ProcessPlan, Role
from plaudit_workers.process import GPU_SHARE

_RANK_SHARE = 0.6
"""Share of a GPU that one of several ranks gets where GPUs are shared: more than half, so that no GPU gets two."""
_SHARE_IN_TURNS = 0.1
"""Share of a single trainer that takes turns with the others: so little that no GPU gets more of them than another,
whether or not the trainer is there."""
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_SMALLEST_FRACTION = 1e-4
"""Ray counts GPUs in this unit."""


def share_gpus(
    plans: dict[Role, list[ProcessPlan]], devices: Sequence[str], *, in_turns: bool = False
) -> dict[Role, list[ProcessPlan]]:
    """Let processes share the GPUs of one machine that has fewer than they request.

    On a cluster nothing is shared (Ray then waits for room). Each process that requests one GPU gets 1 ÷ n of it, n =
    processes ÷ GPUs rounded up: any other fraction leaves pieces that no process fits in. Of several ranks no two share
    a GPU, which NCCL refuses. Engines of several GPUs share them in turns only.
    With ``in_turns`` others free their memory while the trainer updates (``sleepDuringUpdates``), so they divide the
    whole of it; the trainer's share then only finds it a place.
    """
    available = len(devices)
    sharing = [plan for role_plans in plans.values() for plan in role_plans if plan.gpus]
    several = any(plan.gpus > 1 for plan in sharing)
    if sum(plan.gpus for plan in sharing) <= available or (several and not in_turns):
        return plans
    ranks = sum(plan.role == "trainer" for plan in sharing)
    if ranks > available:
        raise RefusedError(
            f"spec.trainer.ranks is {ranks}, but this machine has {available} GPUs and ranks cannot share one. "
            f"Set ranks to {max(1, available)}, or set nvidia.com/gpu: 0 in trainer.pod.resources.limits"
        )
    if several:
        return _assigned(plans, devices)
    in_turns = in_turns and 0 < ranks < len(sharing)
    if ranks > 1 or in_turns:
        of_rank = _RANK_SHARE if ranks > 1 else _SHARE_IN_TURNS
        others = _fraction(1 - of_rank, len(sharing) - ranks, available)
    else:
        of_rank = others = _fraction(1.0, len(sharing), available)
    memory = _fraction(1.0, len(sharing) - ranks, available) if in_turns else others
    return {
        role: [_shared(plan, of_rank, of_rank) if role == "trainer" else _shared(plan, others, memory) for plan in each]
        for role, each in plans.items()
    }


def _assigned(plans: dict[Role, list[ProcessPlan]], devices: Sequence[str]) -> dict[Role, list[ProcessPlan]]:
    """Give rank i the device i, and every other process as many as it requests, one behind the other."""
    chosen: dict[str, Sequence[str]] = {}
    place = 0
    for role, each in plans.items():
        for number, plan in enumerate(each):
            size = math.ceil(plan.gpus)
            if size > len(devices):
                raise RefusedError(
                    f"{plan.name} needs {size} GPUs, but this machine has {len(devices)}. Lower tensorParallelSize"
                )
            if role == "trainer":
                chosen[plan.name] = devices[number : number + 1] if size else ()
            elif size:
                place = 0 if place + size > len(devices) else place
                chosen[plan.name] = devices[place : place + size]
                place += size
    others = Counter(device for name, own in chosen.items() if not name.startswith("trainer") for device in own)
    return {role: [_on(plan, chosen.get(plan.name, ()), others) for plan in each] for role, each in plans.items()}


def _on(plan: ProcessPlan, own: Sequence[str], others: Mapping[str, int]) -> ProcessPlan:
    """Return the plan on these devices; processes other than the trainer divide the memory of each."""
    if not own:
        return plan
    share = 1 / max(1, *(others[device] for device in own))
    variables = {name: ",".join(own) for name in _VISIBLE}
    return replace(plan, gpus=0, environment={**plan.environment, **variables, GPU_SHARE: f"{share:.4f}"})


def _fraction(whole: float, processes: int, available: float) -> float:
    """Return a share of each GPU, divided among its processes and rounded down to Ray's unit."""
    on_each = math.ceil(processes / available)
    return math.floor(whole / on_each / _SMALLEST_FRACTION + _SMALLEST_FRACTION) * _SMALLEST_FRACTION


def _shared(plan: ProcessPlan, share: float, memory: float) -> ProcessPlan:
    if not plan.gpus:
        return plan
    return replace(plan, gpus=round(share, 4), environment={**plan.environment, GPU_SHARE: f"{memory:.4f}"})
