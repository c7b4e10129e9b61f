"""Keeps a run's processes alive: starts them by role, starts crashed ones again, stops them in order.

Each process is a Ray actor. When its process dies Ray makes a fresh one, and the supervisor calls ``run`` on it again.
A process that dies more often than ``max_restarts`` without a step closing in between fails the job.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import ray
import ray.exceptions

from plaudit_wire.logs import get_logger
from plaudit_workers.launch import placement
from plaudit_workers.launch.plan import ProcessPlan, Role
from plaudit_workers.process import EXIT_CRASHED, EXIT_DONE, EXIT_FAILED, EXIT_REFUSED, Ending

logger = get_logger(__name__)

_RESTART_PAUSE_S = 0.5
_GRACE_S = 30.0
_LAST_UPDATE_WITHIN_S = 600.0
"""A trainer that was told to stop finishes its update and writes a checkpoint."""
_NO_LAST_CHECKPOINT = "the trainer did not stop in time; --resume goes on from its last checkpoint"


class Supervisor:
    """Runs the processes of one run.

    Args:
        plans: the processes of each role, in starting order.
        max_restarts: how often one process may crash without a step closing in between.
        steps_closed: how many steps the run has closed so far.
    """

    def __init__(
        self, plans: Mapping[Role, list[ProcessPlan]], *, max_restarts: int, steps_closed: Callable[[], int]
    ) -> None:
        self._plans = plans
        self._max_restarts = max_restarts
        self._steps_closed = steps_closed
        self._groups: list[Any] = []
        self._actors: dict[str, Any] = {}
        self._tasks: list[asyncio.Task[Ending]] = []
        self._trainer: asyncio.Task[Ending] | None = None
        self._stopping = False
        self.restarts: dict[str, int] = {}

    async def start(self) -> None:
        """Places and starts every process. Raises ``RefusedError`` when the cluster has no room."""
        self._groups = [placement.reserve(plans) for plans in self._plans.values()]
        for (role, plans), group in zip(self._plans.items(), self._groups, strict=True):
            await asyncio.to_thread(placement.await_room, role, plans, group)
            for index, plan in enumerate(plans):
                self._actors[plan.name] = placement.start_actor(plan, group, index)
        if "trainer" in self._plans:
            self._trainer = asyncio.create_task(self._keep_ranks(self._plans["trainer"]))
        others = [plan for role, plans in self._plans.items() if role != "trainer" for plan in plans]
        self._tasks = [asyncio.create_task(self._keep(plan)) for plan in others]

    async def until_done(self, stop: asyncio.Event) -> Ending:
        """Waits until the trainer is done, any process ends the job, or ``stop`` is set (then: stops the trainer).

        A scoring service has no trainer: it lasts until ``stop`` is set.
        """
        stopped = asyncio.create_task(stop.wait())
        pending: set[asyncio.Task[Any]] = {stopped, *self._tasks} | ({self._trainer} if self._trainer else set())
        try:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if stopped in done and self._trainer is None:
                return Ending(EXIT_DONE)
            if stopped in done and self._trainer is not None:
                await self._stop_role("trainer")
                await asyncio.wait([self._trainer], timeout=_LAST_UPDATE_WITHIN_S)
                return self._trainer.result() if self._trainer.done() else Ending(EXIT_CRASHED, _NO_LAST_CHECKPOINT)
            ending: Ending = done.pop().result()
            return ending
        finally:
            stopped.cancel()

    async def stop(self) -> None:
        """Stops everything that still runs: asks, waits for the grace period, then ends it."""
        self._stopping = True
        for role in reversed(list(self._plans)):
            await self._stop_role(role)
        waiting = [task for task in [self._trainer, *self._tasks] if task is not None and not task.done()]
        if waiting:
            await asyncio.wait(waiting, timeout=_GRACE_S)
        for task in waiting:
            task.cancel()
        for group in self._groups:
            await asyncio.to_thread(placement.release, group)

    async def pids(self) -> dict[str, int]:
        """Process ids by process name, of the processes that answer now."""
        found = {}
        for name, actor in self._actors.items():
            with contextlib.suppress(ray.exceptions.RayActorError):
                found[name] = await actor.pid.remote()
        return found

    async def _stop_role(self, role: Role) -> None:
        self._stopping = True
        for plan in self._plans.get(role, []):
            actor = self._actors.get(plan.name)
            if actor is not None:
                with contextlib.suppress(ray.exceptions.RayActorError):
                    await asyncio.wait_for(actor.stop.remote(), timeout=5)

    async def _keep(self, plan: ProcessPlan) -> Ending:
        """Runs one process for as long as the run lasts; returns only to end the job (or after a stop)."""
        budget = _RestartBudget(self._max_restarts, self._steps_closed)
        while True:
            try:
                code, message = await self._actors[plan.name].run.remote(dict(plan.secrets))
            except ray.exceptions.RayActorError as error:
                ending = self._after_crash(plan.name, budget, error)
                if ending is not None:
                    return ending
                await self._back(plan)
                continue
            if self._stopping or code in {EXIT_REFUSED, EXIT_FAILED}:
                return Ending(code, f"{plan.name}: {message}" if message else "")
            logger.warning("process ended before the run did", process=plan.name, code=code)
            await asyncio.sleep(_RESTART_PAUSE_S)

    async def _keep_ranks(self, plans: list[ProcessPlan]) -> Ending:
        """Runs the trainer's ranks together: when one dies all start again, since they share collectives."""
        budget = _RestartBudget(self._max_restarts, self._steps_closed)
        while True:
            try:
                return await self._run_ranks(plans)
            except ray.exceptions.RayActorError as error:
                ending = self._after_crash("trainer", budget, error)
                if ending is not None:
                    return ending
            for plan in plans if len(plans) > 1 else ():
                with contextlib.suppress(ray.exceptions.RayActorError):
                    ray.kill(self._actors[plan.name], no_restart=False)
            for plan in plans:
                await self._back(plan)

    async def _run_ranks(self, plans: list[ProcessPlan]) -> Ending:
        host, port = await self._actors[plans[0].name].address.remote()
        ranks = []
        for rank, plan in enumerate(plans):
            rendezvous = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(len(plans))}
            rendezvous |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
            ranks.append(asyncio.wrap_future(self._actors[plan.name].run.remote(rendezvous).future()))
        try:
            endings = await asyncio.gather(*ranks)
        finally:
            for rank_task in ranks:
                rank_task.cancel()
        code, message = max(endings)
        return Ending(code, f"trainer: {message}" if message else "")

    async def _back(self, plan: ProcessPlan) -> None:
        """Waits until Ray has started the process of a dead actor again."""
        while not self._stopping:
            await asyncio.sleep(_RESTART_PAUSE_S)
            with contextlib.suppress(ray.exceptions.ActorUnavailableError):
                await self._actors[plan.name].pid.remote()
                return

    def _after_crash(self, name: str, budget: _RestartBudget, error: Exception) -> Ending | None:
        """Counts a crash. Returns the job's ending when there were too many."""
        if self._stopping:
            return Ending(EXIT_DONE)
        self.restarts[name] = self.restarts.get(name, 0) + 1
        logger.warning("process died", process=name, restarts=self.restarts[name])
        if budget.spent():
            return Ending(
                EXIT_FAILED,
                f"{name} died {self._max_restarts + 1} times without a step closing in between "
                f"(lifecycle.failurePolicy.maxRestarts is {self._max_restarts}); see its log. "
                f"Last: {type(error).__name__}",
            )
        return None


class _RestartBudget:
    """Allows ``max_restarts`` crashes between two closed steps."""

    def __init__(self, max_restarts: int, steps_closed: Callable[[], int]) -> None:
        self._max_restarts = max_restarts
        self._steps_closed = steps_closed
        self._crashes = 0
        self._steps_at_last_crash = -1

    def spent(self) -> bool:
        """Counts one crash; whether it was one too many."""
        steps = self._steps_closed()
        if steps > self._steps_at_last_crash >= 0:
            self._crashes = 0
        self._steps_at_last_crash = steps
        self._crashes += 1
        return self._crashes > self._max_restarts
