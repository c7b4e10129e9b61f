"""Announce policies to the rollouts, take turns with them on shared GPUs, and run the conductor's background tasks.

``Turns`` needs ``Announcements``: an announcement names the update for which rollouts and model servers sleep.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from plaudit_wire.backoff import backoff_s
from plaudit_wire.errors import RefusedError
from plaudit_wire.logs import get_logger
from plaudit_wire.messages import Announcement
from plaudit_wire.records import LIVE_WITHIN_S, WorkerRecord
from plaudit_wire.redis import OUTAGE
from plaudit_workers.training.resume import BackendThread
from plaudit_workers.training.state import RunContext, RunState
from plaudit_workers.weights.deltas import DELTA_SUFFIX
from plaudit_workers.weights.published import is_whole
from plaudit_workers.weights.send import TransferError

logger = get_logger(__name__)
_TRIES = 6
"""To write requested files, with pauses that double: about a minute in all."""
_LOOK_EVERY_S = 0.1
_WARN_EVERY_S = 30.0
_WAKE_WITHIN_S = 30.0
"""After this an engine that still loads weights is taken for one that cannot."""
_OUTAGE_HIDES_AFTER_S = 10.0
"""After a longer outage of Redis a live process may have no heartbeat that counts: they come every 5 s."""


class Announcements:
    """Announce the newest policy, never an older one after it, and write its whole files for rollouts that need them.

    Args:
        look_every_s: seconds between two looks at the requests for files.
    """

    def __init__(self, run: RunContext, state: RunState, thread: BackendThread, look_every_s: float = 1.0) -> None:
        self._run = run
        self._state = state
        self._thread = thread
        self._look_every_s = look_every_s
        self._lock = asyncio.Lock()
        self._failures = 0
        """To write files, one after the other."""

    async def announce(self, announcement: Announcement) -> None:
        """Make a policy the newest one and announce it."""
        self._state.announcement = announcement
        async with self._lock:
            await self._run.streams.announce(announcement)

    async def write_requested_files(self) -> None:
        """Write files when a rollout reports that it could not load the newest policy; runs until cancelled.

        Raises:
            RefusedError: the volume refused them several times, or is full.
        """
        while True:
            await asyncio.sleep(backoff_s(1 + self._failures, self._look_every_s))
            announcement = self._state.announcement
            if await self._lacks_files(announcement) and (rollouts := await self._requesting(announcement)):
                await self._write_for(rollouts, announcement)

    async def _lacks_files(self, announcement: Announcement) -> bool:
        if announcement.transfer is not None:
            return not announcement.path
        try:
            return not await asyncio.to_thread(is_whole, Path(announcement.path))
        except OSError:
            return True  # writing names the problem, if a rollout requests them

    async def _requesting(self, announcement: Announcement) -> list[str]:
        """Return the names of the rollouts that request files of this version."""
        try:
            workers = await self._run.transport.workers()
        except OUTAGE as error:
            self._run.transport.outages.report(error)
            return []
        return [each.worker for each in workers if each.needs_files == str(announcement.version)]

    async def _write_for(self, rollouts: list[str], announcement: Announcement) -> None:
        version = str(announcement.version)
        logger.warning("writing weights as files", version=version, rollouts=rollouts)
        try:
            written = await self._written(announcement)
        except TransferError as error:
            logger.warning("cannot write the weights", version=version, error=str(error))
            return
        except OSError as error:
            self._count_failure(version, rollouts, error)
            return
        self._failures = 0
        async with self._lock:
            if written is not announcement and self._state.announcement is announcement:
                self._state.announcement = written
                await self._run.streams.announce(written)

    async def _written(self, announcement: Announcement) -> Announcement:
        backend = self._thread.backend
        if announcement.transfer is not None:
            return await asyncio.to_thread(backend.write_files, announcement)
        await self._thread.run(backend.write_whole, announcement)  # the ranks write together: not during an update
        return announcement

    def _count_failure(self, version: str, rollouts: list[str], error: OSError) -> None:
        self._failures += 1
        path = str(self._run.folder / "weights" / version)
        logger.warning("cannot write the weights", version=version, path=path, error=str(error), tries=self._failures)
        if self._failures == _TRIES:
            raise RefusedError(
                f"cannot write the weights to {path} in {_TRIES} tries: {error}. {', '.join(rollouts)} could not get "
                f"them in another way. Make {path} writable, then start again with --resume"
            ) from error


def published_bytes(announcement: Announcement) -> int:
    """Return the bytes that a following rollout reads: those of whole weights, or of what changed."""
    if announcement.transfer is not None:
        return announcement.transfer.num_bytes
    folder = Path(announcement.path)
    files = list(folder.glob(f"*{DELTA_SUFFIX}")) or folder.glob("*.safetensors")
    return sum(path.stat().st_size for path in files)


class Turns:
    """Take turns with rollouts and model servers on the same GPUs; without ``sleepDuringUpdates`` all use theirs.

    The announcement names the update for which they sleep, and their heartbeats repeat the name once their memory is
    free. Those that start meanwhile wait before they build their engine. The trainer keeps the GPUs until it has to
    wait for samples or publishes; a trainer that dies leaves them asleep, and the next one's first announcement wakes
    them.
    """

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


class BackgroundTasks:
    """Run work for which the next step does not wait. A failure ends the run as if it had happened in a step."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._finite: set[asyncio.Task[None]] = set()
        self._endless: list[asyncio.Task[None]] = []

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start work that ends by itself, such as closing groups or writing records."""
        task = self._tasks.create_task(work)
        self._finite.add(task)
        task.add_done_callback(self._finite.discard)
        return task

    def start_endless(self, work: Coroutine[Any, Any, None]) -> None:
        """Start work that goes on until ``cancel_endless``."""
        self._endless.append(self._tasks.create_task(work))

    async def join(self) -> None:
        """Return when everything passed to ``start`` has ended."""
        while self._finite:
            await asyncio.wait(self._finite)

    def cancel_endless(self) -> None:
        """Cancel everything passed to ``start_endless``."""
        for task in self._endless:
            task.cancel()
