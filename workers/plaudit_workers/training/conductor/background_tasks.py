"""Run background tasks of the conductor: work for which the next step does not wait.

A failure of any of them ends the run as if it had happened in a step (``asyncio.TaskGroup``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class BackgroundTasks:
    """Run tasks beside the steps, in a group that owns them."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._finite: set[asyncio.Task[None]] = set()
        self._endless: list[asyncio.Task[None]] = []

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start work that ends by itself, such as closing groups or writing records."""
        task = self._tasks.create_task(work)
        self._finite.add(task)
        task.add_done_callback(self._finite.discard)
        return task

    def start_endless(self, work: Coroutine[Any, Any, None]) -> None:
        """Start work that goes on until ``cancel_endless``."""
        self._endless.append(self._tasks.create_task(work))

    async def join(self) -> None:
        """Return when everything passed to ``start`` has ended."""
        while self._finite:
            await asyncio.wait(self._finite)

    def cancel_endless(self) -> None:
        """Cancel everything passed to ``start_endless``."""
        for task in self._endless:
            task.cancel()
