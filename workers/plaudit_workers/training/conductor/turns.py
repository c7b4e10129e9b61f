"""Take turns with rollouts and model servers on the same GPUs (``sleepDuringUpdates``). Used by ``step_training``.

The announcement names the update for which they sleep, and their heartbeats repeat the name once their memory is free.
Those that start meanwhile wait before they build their engine. The trainer keeps the GPUs until it has to wait for
samples or publishes; a trainer that dies leaves them asleep, and the next one's first announcement wakes them.
"""

from __future__ import annotations

import asyncio
import itertools
import time

import msgspec

from plaudit_wire.limits import LIVE_WITHIN_S
from plaudit_wire.logs import get_logger
from plaudit_wire.records import WorkerRecord
from plaudit_workers.training.conductor.announcements import Announcements
from plaudit_workers.training.conductor.backend_thread import BackendThread
from plaudit_workers.training.run.state import RunContext, RunState

logger = get_logger(__name__)

_LOOK_EVERY_S = 0.1
_WARN_EVERY_S = 30.0
_WAKE_WITHIN_S = 30.0
"""After this an engine that still loads weights is taken for one that cannot."""
_OUTAGE_HIDES_AFTER_S = 10.0
"""After a longer outage of Redis a live process may have no heartbeat that counts: they come every 5 s."""


class Turns:
    """Decide whose turn it is; without ``sleepDuringUpdates`` always everybody's."""

    def __init__(
        self, run: RunContext, state: RunState, thread: BackendThread, announcements: Announcements, stop: asyncio.Event
    ) -> None:
        self._run = run
        self._state = state
        self._thread = thread
        self._announcements = announcements
        self._stop = stop
        self._numbers = itertools.count(1)
        sleeping = {"rollout": run.plan.rollouts_sleep, "model": run.plan.models_sleep}
        self._roles = [role for role, sleeps in sleeping.items() if sleeps]

    @property
    def needed(self) -> bool:
        """Return True if others use the trainer's GPUs."""
        return bool(self._roles)

    async def take(self) -> bool:
        """Return True once nobody who takes turns uses the GPUs; False if ``stop`` was set before.

        After an outage of Redis it waits until all live processes have reported again.
        """
        if self.needed and not self._state.announcement.sleep:
            await self._await_waking()
            await self._announce(f"{self._state.version}-{next(self._numbers)}")
        warned = time.monotonic()
        while (awake := await self._awake()) or self._some_unreported:
            if self._stop.is_set():
                return False
            if time.monotonic() - warned > _WARN_EVERY_S:
                warned = time.monotonic()
                logger.warning("the update waits for rollouts or model servers to free their GPUs", workers=awake)
            await asyncio.sleep(_LOOK_EVERY_S)
        return True

    async def _await_waking(self) -> None:
        """Wait until no engine is falling asleep or waking: vLLM ends if another takes its GPU's memory then."""
        deadline = time.monotonic() + _WAKE_WITHIN_S
        while time.monotonic() < deadline and not self._stop.is_set():
            if not any(each.loading or each.asleep for each in await self._sharing()):
                return
            await asyncio.sleep(_LOOK_EVERY_S)

    @property
    def _some_unreported(self) -> bool:
        outages = self._run.transport.outages
        return self.needed and outages.ended_within(LIVE_WITHIN_S, longer_than_s=_OUTAGE_HIDES_AFTER_S)

    async def give_back(self) -> None:
        """Wake the others; rollouts get the weights that they had."""
        if self._state.announcement.sleep:
            await self.free_memory()
            await self._announce("")

    async def free_memory(self) -> None:
        """Return the trainer's memory; the announcement that follows wakes the others."""
        if self.needed:
            await self._thread.run(self._thread.backend.free_memory)

    async def _announce(self, sleep: str) -> None:
        await self._announcements.announce(msgspec.structs.replace(self._state.announcement, sleep=sleep))

    async def _awake(self) -> list[str]:
        """Return the live processes that have not freed their GPUs for this update."""
        sleep = self._state.announcement.sleep
        return [each.worker for each in await self._sharing() if each.asleep != sleep] if sleep else []

    async def _sharing(self) -> list[WorkerRecord]:
        """Return the live processes that take turns."""
        workers = await self._run.transport.retry_through_outage(self._run.transport.workers)
        return [each for each in workers if each.role in self._roles]
