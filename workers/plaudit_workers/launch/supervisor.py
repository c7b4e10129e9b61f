"""Keep the processes of a run alive: start them by role, restart those that crash, stop them in order.

Each process is a Ray actor. When its process dies Ray makes a fresh one, and the supervisor calls ``run`` on it again.
A process that dies more often than ``max_restarts`` without a step closing in between fails the job.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from plaudit_wire.logs import get_logger
from plaudit_workers.launch import placement
from plaudit_workers.launch.log_errors import last_error
from plaudit_workers.launch.plan import ProcessPlan, Role
from plaudit_workers.process import EXIT_CRASHED, EXIT_DONE, EXIT_FAILED, EXIT_REFUSED, ProcessEnding

logger = get_logger(__name__)

_RESTART_PAUSE_S = 0.5
_GRACE_S = 30.0
_ANSWERS_WITHIN_S = 5.0
_LAST_UPDATE_WITHIN_S = 600.0
"""A trainer that is asked to stop finishes its update and writes a checkpoint."""
_NO_LAST_CHECKPOINT = "the trainer did not stop in time; --resume goes on from its last checkpoint"


class Supervisor:
    """Run the processes of one run.

    Args:
        max_restarts: how often one process may crash without a step closing in between.
    """

    def __init__(
        self, plans: Mapping[Role, list[ProcessPlan]], *, max_restarts: int, steps_closed: Callable[[], int]
    ) -> None:
        self._plans = plans
        self._max_restarts = max_restarts
        self._steps_closed = steps_closed
        self._groups: list[Any] = []
        self._actors: dict[str, Any] = {}
        self._tasks: list[asyncio.Task[ProcessEnding]] = []
        self._trainer: asyncio.Task[ProcessEnding] | None = None
        self._stopping = False
        self.restarts: dict[str, int] = {}

    async def start(self) -> None:
        """Place and start every process. Raise ``RefusedError`` when the cluster has no room."""
        self._groups = [placement.reserve(plans) for plans in self._plans.values()]
        for (role, plans), group in zip(self._plans.items(), self._groups, strict=True):
            await placement.await_room(role, plans, group)
            for index, plan in enumerate(plans):
                self._actors[plan.name] = placement.start_actor(plan, group, index)
        if "trainer" in self._plans:
            self._trainer = asyncio.create_task(self._keep_ranks(self._plans["trainer"]))
        others = [plan for role, plans in self._plans.items() if role != "trainer" for plan in plans]
        self._tasks = [asyncio.create_task(self._keep(plan)) for plan in others]

    async def until_done(self) -> ProcessEnding:
        """Wait until the trainer is done or any process ends the job. A scoring service, without one, never ends."""
        running = {*self._tasks} | ({self._trainer} if self._trainer else set())
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()

    async def stop_trainer(self) -> ProcessEnding:
        """Let the trainer finish its update and write a checkpoint."""
        if self._trainer is None:
            return ProcessEnding(EXIT_DONE)
        await self._stop_role("trainer")
        await asyncio.wait([self._trainer], timeout=_LAST_UPDATE_WITHIN_S)
        return self._trainer.result() if self._trainer.done() else ProcessEnding(EXIT_CRASHED, _NO_LAST_CHECKPOINT)

    async def stop(self, *, at_once: bool = False) -> None:
        """Stop everything that still runs; ``at_once`` kills it, without a grace period to finish its work."""
        self._stopping = True
        waiting = [task for task in [self._trainer, *self._tasks] if task is not None and not task.done()]
        if at_once:
            for actor in self._actors.values():
                placement.kill_actor(actor)
        else:
            for role in reversed(list(self._plans)):
                await self._stop_role(role)
            if waiting:
                await asyncio.wait(waiting, timeout=_GRACE_S)
        for task in waiting:
            task.cancel()
        for group in self._groups:
            await asyncio.to_thread(placement.release, group)

    async def _stop_role(self, role: Role) -> None:
        self._stopping = True
        for plan in self._plans.get(role, []):
            actor = self._actors.get(plan.name)
            if actor is not None:
                # An actor that does not answer, on a machine that is too busy, is ended with its placement group.
                with contextlib.suppress(ray.exceptions.RayActorError, TimeoutError):
                    await asyncio.wait_for(actor.stop.remote(), timeout=_ANSWERS_WITHIN_S)

    async def _keep(self, plan: ProcessPlan) -> ProcessEnding:
        """Keep one process running; return only to end the job or after a stop."""
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
                return ProcessEnding(code, f"{plan.name}: {message}" if message else "")
            logger.warning("process ended before the run did", process=plan.name, code=code)
            await asyncio.sleep(_RESTART_PAUSE_S)

    async def _keep_ranks(self, plans: list[ProcessPlan]) -> ProcessEnding:
        """Run the trainer's ranks together: when one dies, all are restarted, since they share collectives."""
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

    async def _run_ranks(self, plans: list[ProcessPlan]) -> ProcessEnding:
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
        return ProcessEnding(code, f"trainer: {message}" if message else "")

    async def _back(self, plan: ProcessPlan) -> None:
        """Wait until Ray has restarted the process of a dead actor."""
        while not self._stopping:
            await asyncio.sleep(_RESTART_PAUSE_S)
            with contextlib.suppress(ray.exceptions.ActorUnavailableError):
                await self._actors[plan.name].pid.remote()
                return

    def _after_crash(self, name: str, budget: _RestartBudget, error: Exception) -> ProcessEnding | None:
        """Count a crash. Return the ending of the job when there were too many."""
        if self._stopping:
            return ProcessEnding(EXIT_DONE)
        self.restarts[name] = self.restarts.get(name, 0) + 1
        logger.warning("process died", process=name, restarts=self.restarts[name])
        if budget.spent():
            return ProcessEnding(
                EXIT_FAILED,
                f"{name} died {self._max_restarts + 1} times without a step closing in between "
                f"(lifecycle.failurePolicy.maxRestarts is {self._max_restarts}). "
                + (self._last_error(name) or f"Its log names no error; Ray reports {type(error).__name__}"),
            )
        return None

    def _last_error(self, name: str) -> str:
        """Return the newest error in the logs of a process, or of the trainer's ranks, as a sentence."""
        plans = [plan for each in self._plans.values() for plan in each if name in {plan.name, plan.role}]
        for plan in plans:
            log = Path(plan.environment["PLAUDIT_LOG_FILE"])
            if error := last_error(log):
                return f"Last error in {log}: {error}"
        return ""


class _RestartBudget:
    """Allow ``max_restarts`` crashes between two closed steps."""

    def __init__(self, max_restarts: int, steps_closed: Callable[[], int]) -> None:
        self._max_restarts = max_restarts
        self._steps_closed = steps_closed
        self._crashes = 0
        self._steps_at_last_crash = -1

    def spent(self) -> bool:
        """Count one crash. Return True when it was one too many."""
        steps = self._steps_closed()
        if steps > self._steps_at_last_crash >= 0:
            self._crashes = 0
        self._steps_at_last_crash = steps
        self._crashes += 1
        return self._crashes > self._max_restarts
