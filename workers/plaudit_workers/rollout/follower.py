"""Run a pod of a replica that is not its leader: it computes part of the model, takes no prompts, never sees Redis.

The leader of a replica that is stopped finishes running samples first, and needs the other pods for them. So a follower
that is stopped at the same moment stays until the leader's health port is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from plaudit_wire.logs import get_logger
from plaudit_workers.health import HealthServer
from plaudit_workers.job.spec.rljob import RLJob
from plaudit_workers.process import ProcessSettings, exit_when_stopped
from plaudit_workers.rollout.replica import ReplicaMember
from plaudit_workers.supervision import unless_stopped

logger = get_logger(__name__)

_LEADER_DRAINS_WITHIN_S = 45.0
"""More than the leader's own limit, less than the pod's grace period."""
_LOOK_EVERY_S = 0.5
_CONNECT_WITHIN_S = 2.0


class EnginePart(Protocol):
    """Compute one follower's part of an engine. All methods block."""

    def start(self) -> None:
        """Join the leader; return when the whole engine is up."""
        ...

    def wait(self) -> None:
        """Return when the part has failed or was closed."""
        ...

    def close(self) -> None:
        """End ``wait`` and free the part's resources."""
        ...


async def follow(settings: ProcessSettings, job: RLJob, member: ReplicaMember, stop: asyncio.Event) -> int:
    """Compute a part of the model until ``stop`` is set and the leader has ended.

    Raises:
        EngineFailedError: the part or the leader broke.
    """
    part, ready = _PARTS[job.spec.rollout.engine.kind](job, member), False
    async with HealthServer(settings.health_port, ready=lambda: ready):
        try:
            if await unless_stopped(stop, asyncio.to_thread(part.start)):
                ready = True
                logger.info("follows", leader=member.leader, rank=member.rank)
                await unless_stopped(stop, asyncio.to_thread(part.wait))
                await until_closed(member.leader, settings.health_port)
        finally:
            await asyncio.to_thread(part.close)
    return exit_when_stopped()


async def until_closed(host: str, port: int) -> None:
    """Return when the leader's health port accepts no connections any more, or after its time to drain.

    Args:
        port: 0 if processes have no health port; nothing is awaited then.
    """
    try:
        async with asyncio.timeout(_LEADER_DRAINS_WITHIN_S):
            while port and await _accepts(host, port):  # noqa: ASYNC110 - another process closes it
                await asyncio.sleep(_LOOK_EVERY_S)
    except TimeoutError:
        logger.warning("leader still running; exiting", leader=host, waited_s=_LEADER_DRAINS_WITHIN_S)


async def _accepts(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(_CONNECT_WITHIN_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def _vllm(job: RLJob, member: ReplicaMember) -> EnginePart:
    from plaudit_workers.rollout.engines.vllm_part import VllmPart

    return VllmPart.from_job(job, member)


def _scripted(_: RLJob, __: ReplicaMember) -> EnginePart:
    from plaudit_workers.rollout.engines.scripted import ScriptedPart

    return ScriptedPart()


_PARTS: dict[str, Callable[[RLJob, ReplicaMember], EnginePart]] = {"vllm": _vllm, "scripted": _scripted}
