"""Work that the next step need not wait for: closing groups, admitting prompts, writing records. For the conductor.

A failure of any of it ends the run as if it had happened in the steps themselves (``asyncio.TaskGroup``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Beside:
    """Tasks beside the steps, in the order in which they were started.

    Args:
        tasks: they live in it.
    """

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._under_way: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts something that ends by itself."""
        task = self._tasks.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    async def settle(self) -> None:
        """Returns when all that was started has ended."""
        while self._under_way:
            await asyncio.wait(self._under_way)
