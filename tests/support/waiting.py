"""Wait for what a test expects, instead of for seconds; tell whether a process runs."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


async def until(condition: Callable[[], Any], within_s: float = 60.0, every_s: float = 0.02) -> float:
    """Wait until a condition holds, which may be a coroutine function; return the seconds that it took.

    Raises:
        TimeoutError: it did not hold within ``within_s``.
    """
    began = time.monotonic()
    async with asyncio.timeout(within_s):
        while not await _value(condition):
            await asyncio.sleep(every_s)
    return time.monotonic() - began


async def until_in_thread(condition: Callable[[], Any], within_s: float = 120.0) -> float:
    """Wait until a condition holds that blocks; return the seconds that it took.

    Raises:
        TimeoutError: it did not hold within ``within_s``.
    """
    return await until(lambda: asyncio.to_thread(condition), within_s, every_s=0.2)


def runs(pid: int) -> bool:
    """Return True if a process of this pid runs; a zombie that its parent has yet to reap does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter: it ended between opening and reading
        return False


async def _value(condition: Callable[[], Any]) -> Any:
    value = condition()
    return await value if inspect.isawaitable(value) else value
