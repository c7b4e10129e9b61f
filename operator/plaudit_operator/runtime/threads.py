"""What the operator's threads share: the values that were used last, and an asyncio event loop beside them."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Coroutine, Hashable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T")


class Latest(Generic[K, V]):
    """Keep ``size`` values, and drop the one that was used least recently. Thread-safe."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        """Return the value of a key; None if it is not kept."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: K, value: V) -> None:
        """Keep a value."""
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            if len(self._values) > self._size:
                self._values.popitem(last=False)


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
