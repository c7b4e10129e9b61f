"""Wait for the results of a request: all of them, or as they come, as long as its caller is connected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from plaudit_workers.gateway.callers.caller_session import Awaited

Receive = Callable[[], Awaitable[Any]]


class DisconnectedError(Exception):
    """The caller has closed its connection."""


async def wait_for_all(awaited: Sequence[Awaited], receive: Receive, timeout_s: float) -> bool:
    """Wait for all results; return False when time is up first.

    Args:
        receive: of the request, whose body has been read: it returns when the caller leaves.

    Raises:
        DisconnectedError: the caller has left.
    """
    left = asyncio.ensure_future(receive())
    try:
        async with asyncio.timeout(timeout_s):
            for each in awaited:
                if not each.result.done():
                    await asyncio.wait((each.result, left), return_when=asyncio.FIRST_COMPLETED)
                if not each.result.done():
                    raise DisconnectedError
    except TimeoutError:
        return False
    finally:
        left.cancel()
    return True


async def wait_for_accepted(awaited: Sequence[Awaited], timeout_s: float) -> None:
    """Wait until Redis holds all of these, or until time is up."""
    try:
        async with asyncio.timeout(timeout_s):
            for each in awaited:
                await each.accepted.wait()
    except TimeoutError:
        return


async def as_they_come(
    awaited: Sequence[Awaited], receive: Receive, timeout_s: float, quiet_s: float
) -> AsyncIterator[list[int]]:
    """Yield the positions of results as they come, all that are there at once; [] after ``quiet_s`` without any.

    Ends when all have come or when time is up.

    Raises:
        DisconnectedError: the caller has left.
    """
    loop = asyncio.get_running_loop()
    ended: list[int] = []
    changed = asyncio.Event()
    left = asyncio.ensure_future(receive())
    left.add_done_callback(lambda _: changed.set())

    def note(position: int) -> None:
        ended.append(position)
        changed.set()

    for position, each in enumerate(awaited):
        each.result.add_done_callback(lambda _, position=position: note(position))  # type: ignore[misc]
    deadline, num_left = loop.time() + timeout_s, len(awaited)
    try:
        while num_left and loop.time() < deadline:
            changed.clear()
            if not ended:
                timer = loop.call_later(min(quiet_s, deadline - loop.time()), changed.set)
                await changed.wait()
                timer.cancel()
            if left.done():
                raise DisconnectedError
            come, ended[:] = ended[:], []
            num_left -= len(come)
            yield come
    finally:
        left.cancel()
