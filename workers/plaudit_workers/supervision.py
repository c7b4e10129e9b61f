"""Run tasks that end together, and wait under a stop signal. Used by the workers of every role."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Set
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Self


class Supervised(AbstractAsyncContextManager["Supervised"]):
    """Run tasks beside a body: when one fails, the others and the body are cancelled; when the body ends, all are.

    On exit it raises the exception of the first task that failed, not an exception group.
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` beside the body."""
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        try:
            await self._group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            raise _first(group) from None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


async def drained(works: Set[asyncio.Task[Any]], grace_s: float) -> tuple[int, int]:
    """Let works end by themselves for ``grace_s`` seconds, then cancel the rest; return the numbers of both."""
    if not works:
        return 0, 0
    done, left = await asyncio.wait(works, timeout=grace_s)
    for work in left:
        work.cancel()
    await asyncio.wait(works)
    return len(done), len(left)


async def set_within(event: asyncio.Event, timeout_s: float) -> None:
    """Return when ``event`` is set after this call, or after ``timeout_s``."""
    event.clear()
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return


async def unless_stopped(stop: asyncio.Event, work: Awaitable[object]) -> bool:
    """Await ``work``, or cancel it when ``stop`` is set first; return True when it ended by itself."""
    running = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    both: Set[asyncio.Future[Any]] = {running, stopped}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            return False
        running.result()
        return True
    finally:
        for future in both:
            future.cancel()
        await asyncio.wait(both)
