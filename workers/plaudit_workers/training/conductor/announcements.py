"""Announce policies, and write the files of a directly offered one for rollouts that cannot receive it.

Used by the conductor.
"""

from __future__ import annotations

import asyncio

from plaudit_wire.logs import get_logger
from plaudit_wire.messages import Announcement
from plaudit_wire.outage import OUTAGE
from plaudit_workers.training.run.state import RunContext, RunState
from plaudit_workers.training.trainer_backend import TrainerBackend
from plaudit_workers.weight_transfer.exchange import TransferError

logger = get_logger(__name__)

_LOOK_EVERY_S = 1.0


class Announcements:
    """Announces the newest policy; never an older one after it.

    Args:
        run: the run's context.
        state: its current state.
        backend: writes the files.
    """

    def __init__(self, run: RunContext, state: RunState, backend: TrainerBackend) -> None:
        self._run = run
        self._state = state
        self._backend = backend
        self._lock = asyncio.Lock()

    async def announce(self, announcement: Announcement) -> None:
        """Make a policy the newest one and announce it."""
        self._state.announcement = announcement
        async with self._lock:
            await self._run.streams.announce(announcement)

    async def write_requested_files(self) -> None:
        """Write files when a rollout reports that it could not receive the newest policy; runs until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            announcement = self._state.announcement
            if announcement.transfer is None or announcement.path:
                continue
            try:
                await self._write_if_requested(announcement)
            except OUTAGE as error:
                self._run.transport.outages.report(error)
            except TransferError as error:
                logger.warning("cannot write the weights", version=str(announcement.version), error=str(error))

    async def _write_if_requested(self, announcement: Announcement) -> None:
        version = str(announcement.version)
        requesting = [each.worker for each in await self._run.transport.workers() if each.needs_files == version]
        if not requesting:
            return
        logger.warning("writing weights as files", version=version, rollouts=requesting)
        written = await asyncio.to_thread(self._backend.write_files, announcement)
        async with self._lock:
            if self._state.announcement is announcement:
                self._state.announcement = written
                await self._run.streams.announce(written)
