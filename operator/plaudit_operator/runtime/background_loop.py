"""An asyncio event loop on a thread of its own, beside the operator's threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """Run coroutines for other threads, on a thread of this name."""

    loop: asyncio.AbstractEventLoop

    def __init__(self, name: str) -> None:
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(started)), name=name, daemon=True)
        self._thread.start()
        started.wait()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop and return its future."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self) -> None:
        """Cancel what runs and end the thread."""
        self.loop.call_soon_threadsafe(self._closed.set)
        self._thread.join()

    async def _run(self, started: threading.Event) -> None:
        self.loop, self._closed = asyncio.get_running_loop(), asyncio.Event()
        started.set()
        await self._closed.wait()
