"""Call no served model while the trainer uses its GPU (``sleepDuringUpdates``): look, hold, report.

The model's servers (``launch.served_models.turns``) follow the trainer's announcements and ask for it in their
heartbeats. Calls under way finish first; then the worker's own heartbeat says so, for which the servers wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from plaudit_reward.served.gate import CallGate
from plaudit_wire.logs import get_logger
from plaudit_workers.stream.connection import Transport

logger = get_logger(__name__)

_LOOK_EVERY_S = 0.2


class ModelTurns:
    """Take one reward worker's turns with models that sleep; ``gate`` is closed until the first look."""

    def __init__(self, transport: Transport, gate: CallGate) -> None:
        self._transport = transport
        self._gate = gate
        self.asleep = ""
        """The servers' request (``calls_held_for``), once no call is under way and none begins."""
        gate.close()

    async def watch(self, changed: Callable[[], Awaitable[None]]) -> None:
        """Hold calls when a live server asks for it, until cancelled; report each change by ``changed``."""
        await changed()  # a server that does not know this worker would not wait for its calls
        while True:
            before = self.asleep
            await self._transport.retry_through_outage(self._look)
            if self.asleep != before:
                logger.info("calls to served models are held" if self.asleep else "calls to served models continue")
                await changed()
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _look(self) -> None:
        asked = max((each.calls_held_for for each in await self._transport.workers()), default="")
        if not asked:
            self._gate.open()
            self.asleep = ""
            return
        self._gate.close()
        self.asleep = asked if self._gate.idle else ""
