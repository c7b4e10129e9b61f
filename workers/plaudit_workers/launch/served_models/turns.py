"""Take turns with the trainer on a model server's GPU (``sleepDuringUpdates``): follow the announcement, sleep, report.

Before a server sleeps, its heartbeat asks reward workers to hold their calls, and all live ones have reported that none
is under way (``scoring.model_turns``). So no sample is with a server that sleeps.
"""

from __future__ import annotations

import asyncio
from typing import Final

from plaudit_wire.logs import get_logger
from plaudit_wire.records import WorkerRecord
from plaudit_workers.launch.served_models.server_client import ServerClient
from plaudit_workers.stream.connection import Transport

logger = get_logger(__name__)

ROLE: Final = "model"
_LOOK_EVERY_S = 0.2
_BEAT_EVERY_S = 5.0


class ServerTurns:
    """Take one server's turns with the trainer. The caller closes the transport."""

    def __init__(self, worker: str, transport: Transport) -> None:
        self._worker = worker
        self._transport = transport
        self._held_for = ""
        self._asleep = ""
        self._serving = False

    async def beats(self) -> None:
        """Report that this server lives, until cancelled."""
        while True:
            await self._beat()
            await asyncio.sleep(_BEAT_EVERY_S)

    async def begin(self) -> None:
        """Return once the trainer lets the server take its GPU; to be called before it is started."""
        await self._beat()  # first: a trainer that has not seen this server cannot wait for it
        while sleep := await self._announced():
            await self._report(held_for=sleep, asleep=sleep)
            await asyncio.sleep(_LOOK_EVERY_S)
        await self._report(held_for="", asleep="")

    async def follow(self, server: ServerClient) -> None:
        """Let the ready server sleep during updates, until cancelled."""
        self._serving = True
        await self._beat()
        while True:
            await self._take_turn(server)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _take_turn(self, server: ServerClient) -> None:
        sleep = await self._announced()
        if sleep and not self._asleep:
            await self._report(held_for=sleep, asleep="")
            if await self._is_called(sleep):
                return
            await server.sleep()
            logger.info("asleep", update=sleep)
        elif self._asleep and not sleep:
            await server.wake_up()
            logger.info("awake")
        await self._report(held_for=sleep, asleep=sleep)  # also if this look is the first after two announcements

    async def _is_called(self, sleep: str) -> bool:
        """Return True while a live reward worker may have calls under way."""
        workers = await self._transport.retry_through_outage(self._transport.workers)
        return any(each.role == "reward" and each.asleep != sleep for each in workers)

    async def _announced(self) -> str:
        announcement = await self._transport.retry_through_outage(self._transport.announced)
        return announcement.sleep if announcement is not None else ""

    async def _report(self, *, held_for: str, asleep: str) -> None:
        if (held_for, asleep) != (self._held_for, self._asleep):
            self._held_for, self._asleep = held_for, asleep
            await self._beat()

    async def _beat(self) -> None:
        record = WorkerRecord(
            self._worker, ROLE, ready=self._serving, asleep=self._asleep, calls_held_for=self._held_for
        )
        await self._transport.beat(record)
