"""Estimate the transport's clock locally: an offset to the monotonic clock, renewed about every second.

Waits and closings are stamped with it, so that they fit what the stream scripts stamped; a Redis that is away for a
while does not stop it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable


class ServerClock:
    """Estimate the server's clock; ``ask`` returns its seconds since the epoch."""

    def __init__(self, ask: Callable[[], Awaitable[float]]) -> None:
        self._ask = ask
        self._offset_s = time.time() - time.monotonic()

    async def synchronise(self) -> None:
        """Ask the server; its reply counts for the middle of the round trip."""
        asked = time.monotonic()
        server = await self._ask()
        self._offset_s = server - (asked + time.monotonic()) / 2

    def now(self) -> float:
        """Return seconds since the epoch on the server's clock."""
        return time.monotonic() + self._offset_s
