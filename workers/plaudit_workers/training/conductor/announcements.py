"""Announce policies, and write whole files of one that was offered directly or as a delta, for rollouts that need them.

Used by the conductor.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from plaudit_wire.logs import get_logger
from plaudit_wire.messages import Announcement
from plaudit_wire.outage import OUTAGE
from plaudit_workers.training.conductor.backend_thread import BackendThread
from plaudit_workers.training.run.state import RunContext, RunState
from plaudit_workers.weight_deltas.folders import DELTA_SUFFIX, is_whole
from plaudit_workers.weight_transfer.exchange import TransferError

logger = get_logger(__name__)

_LOOK_EVERY_S = 1.0


class Announcements:
    """Announces the newest policy; never an older one after it.

    Args:
        run: the run's context.
        state: its current state.
        thread: runs the backend that writes the files.
    """

    def __init__(self, run: RunContext, state: RunState, thread: BackendThread) -> None:
        self._run = run
        self._state = state
        self._thread = thread
        self._lock = asyncio.Lock()

    async def announce(self, announcement: Announcement) -> None:
        """Make a policy the newest one and announce it."""
        self._state.announcement = announcement
        async with self._lock:
            await self._run.streams.announce(announcement)

    async def write_requested_files(self) -> None:
        """Write files when a rollout reports that it could not load the newest policy; runs until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            announcement = self._state.announcement
            try:
                if await self._lacks_files(announcement) and await self._is_requested(announcement):
                    await self._write(announcement)
            except OUTAGE as error:
                self._run.transport.outages.report(error)
            except TransferError as error:
                logger.warning("cannot write the weights", version=str(announcement.version), error=str(error))

    async def _lacks_files(self, announcement: Announcement) -> bool:
        if announcement.transfer is not None:
            return not announcement.path
        return not await asyncio.to_thread(is_whole, Path(announcement.path))

    async def _is_requested(self, announcement: Announcement) -> bool:
        version = str(announcement.version)
        requesting = [each.worker for each in await self._run.transport.workers() if each.needs_files == version]
        if requesting:
            logger.warning("writing weights as files", version=version, rollouts=requesting)
        return bool(requesting)

    async def _write(self, announcement: Announcement) -> None:
        backend = self._thread.backend
        if announcement.transfer is None:  # a delta: the ranks write together, so not during an update
            await self._thread.run(backend.write_whole, announcement)
            return
        written = await asyncio.to_thread(backend.write_files, announcement)
        async with self._lock:
            if self._state.announcement is announcement:
                self._state.announcement = written
                await self._run.streams.announce(written)


def published_bytes(announcement: Announcement) -> int:
    """Return the bytes of the weights that a rollout which follows reads: whole ones, or what changed."""
    if announcement.transfer is not None:
        return announcement.transfer.num_bytes
    folder = Path(announcement.path)
    files = list(folder.glob(f"*{DELTA_SUFFIX}")) or folder.glob("*.safetensors")
    return sum(path.stat().st_size for path in files)
