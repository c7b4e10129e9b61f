"""Count the samples that a worker is generating, and its free places. Used by ``worker`` and ``prompt_work``."""

from __future__ import annotations

import asyncio


class Claim:
    """The places held by the samples of one prompt."""

    def __init__(self, slots: Slots, count: int) -> None:
        self._slots = slots
        self._count = count
        slots.change_busy(count)

    def shrink_to(self, count: int) -> None:
        """Release places until ``count`` are left; never grow."""
        if count < self._count:
            self._slots.change_busy(count - self._count)
            self._count = count

    def release_one(self) -> None:
        """Release the place of a finished sample."""
        self.shrink_to(self._count - 1)


class Slots:
    """Counts running samples. A single prompt may exceed ``limit``; nothing further is taken until places are free."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.busy = 0
        self._freed = asyncio.Event()

    @property
    def free(self) -> int:
        """Samples that may be started now; 0 while one prompt exceeds the limit."""
        return max(0, self.limit - self.busy)

    def claim(self, count: int) -> Claim:
        """Take ``count`` places."""
        return Claim(self, count)

    def change_busy(self, count: int) -> None:
        """Add ``count`` to the busy places; called by claims."""
        self.busy += count
        if count < 0:
            self._freed.set()

    async def wait_free(self) -> None:
        """Wait until at least one place is free."""
        while not self.free:
            self._freed.clear()
            await self._freed.wait()
