"""The sessions of all callers at one gateway: opened with a caller's first request, served until the gateway stops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Set

from plaudit_wire.messages import Service
from plaudit_wire.outage import OUTAGE
from plaudit_workers.gateway.callers.caller_session import CallerSession, Limits
from plaudit_workers.stream.connection import Transport
from plaudit_workers.stream.sessions import StreamSession
from plaudit_workers.supervision import Supervised

_CLEAN_UP_EVERY_S = 2.0
_IDLE_KEPT_S = 3600.0
"""Seconds after its last request in which a caller keeps its place here; its results stay in Redis for longer."""


class Callers:
    """Hold the sessions by caller. ``run`` must be running."""

    def __init__(self, transport: Transport, service: Service, limits: Limits | None = None) -> None:
        self.transport = transport
        self.service = service
        self._limits = limits or Limits()
        self._sessions: dict[str, CallerSession] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._used_at: dict[str, float] = {}
        self._tasks = Supervised()
        self.is_running = asyncio.Event()

    @property
    def names(self) -> Set[str]:
        """Return the callers that have sessions now."""
        return self._sessions.keys()

    @property
    def num_awaited(self) -> int:
        """Return the number of samples and groups that requests await."""
        return sum(session.num_awaited for session in self._sessions.values())

    def session(self, caller: str) -> CallerSession:
        """Return the session of a caller."""
        session = self._sessions.get(caller)
        if session is None:
            session = self._sessions[caller] = CallerSession(self.transport, caller, self.service, self._limits)
            self._running[caller] = self._tasks.start(session.run())
        self._used_at[caller] = time.monotonic()
        return session

    async def run(self) -> None:
        """Serve the sessions until cancelled. Raises what ends one of them."""
        async with self._tasks:
            self.is_running.set()
            await self._clean_up_forever()

    def _end_idle(self) -> None:
        """End the sessions of callers that have gone."""
        now = time.monotonic()
        for caller in [each for each, at in self._used_at.items() if now - at > _IDLE_KEPT_S]:
            if self._sessions[caller].num_awaited == 0:
                self._running.pop(caller).cancel()
                del self._sessions[caller], self._used_at[caller]

    async def _clean_up_forever(self) -> None:
        """Release overdue groups and end expired sessions, as every client of the service does."""
        session = StreamSession(self.transport, "http", self.service, keep_s=0.0)
        while True:
            await asyncio.sleep(_CLEAN_UP_EVERY_S)
            self._end_idle()
            try:
                await session.clean_up()
            except OUTAGE as error:
                self.transport.outages.report(error)
