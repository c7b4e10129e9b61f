"""Where an engine leaves finished samples until its reader comes for them. Used by every engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from plaudit_workers.rollout.engines.protocol import Outcome


class Outbox:
    """Batches by what is there: the reader gets all that ended since it last looked. One event loop, one reader."""

    def __init__(self) -> None:
        self._outcomes: list[Outcome] = []
        self._error: Exception | None = None
        self._closed = False
        self._changed = asyncio.Event()

    def put(self, outcomes: list[Outcome]) -> None:
        """Leaves finished or refused samples for the reader."""
        self._outcomes.extend(outcomes)
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """Makes the reader raise ``error`` once it has read what is left."""
        self._error = error
        self._changed.set()

    def close(self) -> None:
        """Ends the reader's loop once it has read what is left."""
        self._closed = True
        self._changed.set()

    async def read(self) -> AsyncIterator[list[Outcome]]:
        """Yields batches of at least one outcome until the outbox is closed."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            outcomes, self._outcomes = self._outcomes, []
            if outcomes:
                yield outcomes
            if self._error is not None:
                raise self._error
            if self._closed:
                return
