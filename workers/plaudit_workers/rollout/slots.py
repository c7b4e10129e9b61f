"""How many samples a worker has in work, and room for more. Used by ``worker`` and ``prompt_work``."""

from __future__ import annotations

import asyncio


class Claim:
    """The places that one prompt's samples take."""

    def __init__(self, slots: Slots, count: int) -> None:
        self._slots = slots
        self._count = count
        slots.change_busy(count)

    def shrink_to(self, count: int) -> None:
        """Gives places back until ``count`` are left; never grows."""
        if count < self._count:
            self._slots.change_busy(count - self._count)
            self._count = count

    def give_one(self) -> None:
        """Gives back the place of a sample that is done."""
        self.shrink_to(self._count - 1)


class Slots:
    """Counts samples in work. ``limit`` bounds what is taken on, not what one prompt may bring."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.busy = 0
        self._freed = asyncio.Event()

    @property
    def free(self) -> int:
        """Samples that may be taken on now; 0 when one prompt brought more than fitted."""
        return max(0, self.limit - self.busy)

    def claim(self, count: int) -> Claim:
        """Takes ``count`` places."""
        return Claim(self, count)

    def change_busy(self, count: int) -> None:
        """Adds ``count`` to the busy places; called by claims."""
        self.busy += count
        if count < 0:
            self._freed.set()

    async def wait_free(self) -> None:
        """Waits until at least one place is free."""
        while not self.free:
            self._freed.clear()
            await self._freed.wait()
