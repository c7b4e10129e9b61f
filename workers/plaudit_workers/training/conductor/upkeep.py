"""Do the trainer's periodic work: heartbeat, deadlines, admissions that found no room, lost groups.

Runs beside the conductor's steps about once a second, also during an update.
"""

from __future__ import annotations

import asyncio
import time

from plaudit_wire.logs import get_logger
from plaudit_wire.outage import OUTAGE
from plaudit_wire.records import WorkerRecord
from plaudit_workers.training.conductor.groups.admission import Admitter
from plaudit_workers.training.conductor.groups.closing import correct_counters, discard_group
from plaudit_workers.training.run.state import RunContext, RunState

logger = get_logger(__name__)

_EVERY_S = 1.0
_BEAT_EVERY_S = 5.0


class Upkeep:
    """Run the trainer's periodic work; see the module's docstring."""

    def __init__(self, run: RunContext, state: RunState, admitter: Admitter) -> None:
        self._run = run
        self._state = state
        self._admitter = admitter
        self._next_beat = 0.0
        self._started = 0.0
        """When the first heartbeat was sent (server's clock); 0 before."""
        self._reported = ""
        self._unknown: set[str] = set()

    async def keep(self) -> None:
        """Run until cancelled, through outages of Redis."""
        while True:
            try:
                await self._once()
            except OUTAGE as error:
                self._run.transport.outages.report(error)
            await asyncio.sleep(_EVERY_S)

    async def _once(self) -> None:
        await self._run.clock.synchronise()
        await self._beat()
        await self._run.streams.release_expired()
        open_groups = set(await self._run.streams.open_groups())
        await self._return_lost(open_groups)
        await self._discard_unknown(open_groups)
        if not self._admitter.pending:
            await correct_counters(self._run, self._state)
        await self._admitter.admit_training()

    async def _beat(self) -> None:
        problem = self._state.problem
        if time.monotonic() >= self._next_beat or problem != self._reported:
            self._next_beat, self._reported = time.monotonic() + _BEAT_EVERY_S, problem
            self._started = self._started or self._run.clock.now()
            record = WorkerRecord(
                self._run.worker,
                "trainer",
                version=str(self._state.version),
                started=self._started,
                problem=problem,
            )
            await self._run.transport.beat(record)

    async def _return_lost(self, open_groups: set[str]) -> None:
        """Admit the prompts of groups that Redis has lost again (FLUSHALL, failover)."""
        names = [flight.group for flight in self._state.ledger.flights()]
        doubtful = [name for name in names if name not in open_groups and self._can_be_lost(name)]
        for group in await self._run.streams.missing(doubtful):
            if self._state.ledger.find(group) and self._can_be_lost(group):
                self._state.ledger.end(group, "dropped", "lost", again=True)
                self._state.counters_suspect = True
                logger.error("group lost", group=group)

    def _can_be_lost(self, group: str) -> bool:
        return group not in self._run.streams.taken and group not in self._admitter.pending

    async def _discard_unknown(self, open_groups: set[str]) -> None:
        """Close groups again that ended long ago and reappeared with an old append-only file; never train them."""
        unknown = {group for group in open_groups if self._state.ledger.find(group) is None}
        for group in unknown & self._unknown:  # seen twice: not one that is being closed just now
            logger.error("group reappeared", group=group)
            await discard_group(self._run, self._state, group)
        self._unknown = unknown
