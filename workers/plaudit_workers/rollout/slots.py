"""Count the samples that a worker has in work, and its free places. Used by ``worker`` and ``prompt_work``.

A sample is in the engine or in its agent (waiting for tools). A worker takes further prompts while the engine has free
places and the number of samples in agents is below a limit of its own, so the engine stays busy while tools run.
"""

from __future__ import annotations

import asyncio


class Claim:
    """Hold the places held by the samples of one prompt."""

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

    def change_in_agents(self, count: int) -> None:
        """Add ``count`` to the samples that wait for their agents instead of the engine."""
        self._slots.change_in_agents(count)


class Slots:
    """Count samples in work. A single prompt may exceed ``limit``; then nothing is taken until places are free.

    Args:
        limit: samples in the engine at a time.
        agents_limit: samples that wait for their agents at a time.
    """

    def __init__(self, limit: int, agents_limit: int = 0) -> None:
        self.limit = limit
        self.agents_limit = agents_limit
        self.busy = 0
        """Samples in the engine and in agents."""
        self.in_agents = 0
        """The part of ``busy`` that waits for agents."""
        self._freed = asyncio.Event()

    @property
    def free(self) -> int:
        """Return the number of samples that may be started now; 0 while one prompt exceeds the limit."""
        return max(0, self.limit + min(self.in_agents, self.agents_limit) - self.busy)

    def claim(self, count: int) -> Claim:
        """Take ``count`` places."""
        return Claim(self, count)

    def change_busy(self, count: int) -> None:
        """Add ``count`` to the busy places; called by claims."""
        self.busy += count
        if count < 0:
            self._freed.set()

    def change_in_agents(self, count: int) -> None:
        """Add ``count`` to the samples in agents; called by claims."""
        self.in_agents += count
        if count > 0 and self.agents_limit:
            self._freed.set()

    async def wait_free(self) -> None:
        """Wait until at least one place is free."""
        while not self.free:
            self._freed.clear()
            await self._freed.wait()
