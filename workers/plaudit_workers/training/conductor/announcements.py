"""Announce policies, and write whole files of one that was offered directly or as a delta, for rollouts that need them.

Used by the conductor.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from plaudit_wire.errors import RefusedError
from plaudit_wire.logs import get_logger
from plaudit_wire.messages import Announcement
from plaudit_wire.outage import OUTAGE
from plaudit_workers.training.conductor.backend_thread import BackendThread
from plaudit_workers.training.run.state import RunContext, RunState
from plaudit_workers.weight_deltas.folders import DELTA_SUFFIX, is_whole
from plaudit_workers.weight_transfer.exchange import TransferError

logger = get_logger(__name__)

_TRIES = 6
"""To write requested files, with pauses that double: about a minute in all."""


class Announcements:
    """Announce the newest policy, never an older one after it.

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
            await asyncio.sleep(self._look_every_s * 2**self._failures)
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
