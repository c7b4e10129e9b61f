"""Hold the calls to served models while the trainer uses their GPUs. Opened and closed by the reward worker."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator


class CallGate:
    """Let calls through while it is open, as from the start, and count those under way."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self._calls = 0
        self.open()

    @property
    def is_open(self) -> bool:
        """Return True while calls may begin."""
        return self._opened.is_set()

    @property
    def idle(self) -> bool:
        """Return True if no call is under way."""
        return self._calls == 0

    def open(self) -> None:
        """Let all waiting calls begin."""
        self._opened.set()

    def close(self) -> None:
        """Let no further call begin; those under way continue."""
        self._opened.clear()

    async def passed(self) -> float:
        """Wait until calls may begin; return the seconds that this took, 0 if it is open."""
        if self.is_open:
            return 0.0
        began_s = time.monotonic()
        await self._opened.wait()
        return time.monotonic() - began_s

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Count a call as under way."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
