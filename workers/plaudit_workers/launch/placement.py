"""Place processes on Ray: a placement group for each role (the resource pools of verl #3152), an actor a process."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import ray
import ray.exceptions
from ray._raylet import Config  # type: ignore[attr-defined]
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from plaudit_wire.errors import RefusedError
from plaudit_workers.launch.actor import ProcessActor
from plaudit_workers.launch.plan import ProcessPlan

_ROOM_WITHIN_S = 60.0

_LOOPBACK = "127.0.0.1"

# Ray runs its workers at the lowest priority by default; a rollout must not yield to every other program. Whoever
# reaches a Ray without a token runs code as this user, and some of its ports listen on every address of the machine.
_OF_A_LOCAL_RAY = {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token"}


def connect(address: str | None, *, num_cpus: float) -> None:
    """Join the cluster at ``address``, or start a Ray with a token on this machine, which ``disconnect`` ends.

    Args:
        num_cpus: that all processes of the job request; a laptop with fewer cores shares them.

    Raises:
        RefusedError: no cluster responds at the address.
    """
    options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        for name, value in _OF_A_LOCAL_RAY.items():
            os.environ.setdefault(name, value)
        Config.initialize("")  # Ray read its environment when it was imported
        _start(num_cpus=max(os.cpu_count() or 1, int(num_cpus) + 1), _node_ip_address=_LOOPBACK, **options)
        return
    options.pop("include_dashboard")
    try:
        ray.init(address=address, **options)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise RefusedError(
            f"--address {address}: no Ray cluster responds there ({error}). Is 'ray start' running, and does "
            "~/.ray/auth_token or RAY_AUTH_TOKEN hold its token?"
        ) from error


def _start(**options: Any) -> None:
    """Start Ray; try a second time when a busy machine needed longer than the 30 s that Ray allows itself."""
    try:
        ray.init(**options)
    except Exception as error:
        if "timed out during startup" not in str(error):
            raise
        ray.shutdown()
        ray.init(**options)


def disconnect() -> None:
    """Leave the cluster; end it when ``connect`` started it."""
    ray.shutdown()


def gpus_available() -> float:
    """Return the number of GPUs in the cluster."""
    return float(ray.cluster_resources().get("GPU", 0))


def devices(count: int) -> list[str]:
    """Return the first GPUs of this machine, as ``CUDA_VISIBLE_DEVICES`` names them."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return (visible or [str(number) for number in range(count)])[:count]


def reserve(plans: Sequence[ProcessPlan]) -> PlacementGroup:
    """Request room for all processes of a role."""
    return placement_group([_bundle(plan) for plan in plans], strategy="PACK")


async def await_room(role: str, plans: Sequence[ProcessPlan], group: PlacementGroup) -> None:
    """Wait until a role has its room.

    Raises:
        RefusedError: the cluster has no room for it within a minute.
    """
    deadline = time.monotonic() + _ROOM_WITHIN_S
    while time.monotonic() < deadline:
        if await asyncio.to_thread(group.wait, 1):
            return
    free = {kind: amount for kind, amount in ray.available_resources().items() if kind in {"CPU", "GPU"}}
    raise RefusedError(
        f"the Ray cluster has no room for role {role}: it needs {[_bundle(plan) for plan in plans]}, free is {free}. "
        "Lower the role's replicas or ranks, or add nodes"
    )


def release(group: PlacementGroup) -> None:
    """Return the room to the cluster, which kills what still runs in it."""
    remove_placement_group(group)


def start_actor(plan: ProcessPlan, group: PlacementGroup, index: int) -> Any:
    """Start the actor of one process in its role's bundle ``index``; Ray restarts it when its process dies."""
    actor_class = ray.remote(ProcessActor)
    return actor_class.options(
        num_cpus=plan.cpus,
        num_gpus=plan.gpus,
        max_restarts=-1,
        max_task_retries=0,
        max_concurrency=8,
        runtime_env={"env_vars": dict(plan.environment)},
        scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index),
    ).remote(plan.name, plan.serve)


def kill_actor(actor: Any) -> None:
    """Kill the process of an actor, for good."""
    ray.kill(actor, no_restart=True)


def _bundle(plan: ProcessPlan) -> dict[str, float]:
    return {"CPU": plan.cpus} | ({"GPU": plan.gpus} if plan.gpus else {})
