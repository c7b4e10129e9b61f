"""Call ``RewardClient`` from programs without an event loop: ``SyncRewardClient`` runs one in a background thread."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from plaudit_client.client import RewardClient, SampleMapping
from plaudit_client.result import Result

T = TypeVar("T")


class SyncRewardClient:
    """Score samples with a reward service; arguments and methods are those of ``RewardClient``.

    Any number of threads may call it at once: their samples share requests. Close it, or use it as a context, to end
    its thread; a program that ends closes it too.
    """

    def __init__(self, url: str, token: str = "", **arguments: Any) -> None:
        self._client = RewardClient(url, token, **arguments)
        self._make = functools.partial(type(self), url, token, **arguments)
        self._thread = LoopThread("plaudit-client")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._client.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return self._make, ()

    def __enter__(self) -> SyncRewardClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the background thread; a later call starts both again."""
        self._thread.stop(self._client.aclose)

    def score(self, sample: SampleMapping) -> Result:
        """Score one sample; see ``RewardClient.score``."""
        return self._thread.run(self._client.score(sample))

    def score_many(self, samples: Iterable[SampleMapping]) -> Iterator[Result]:
        """Score samples and yield results in order of completion; see ``RewardClient.score_many``."""
        return self._thread.iterate(self._client.score_many(samples))

    def score_group(self, samples: Sequence[SampleMapping], id: str = "") -> list[Result]:  # noqa: A002 (what it is)
        """Score the samples of one prompt together; see ``RewardClient.score_group``."""
        return self._thread.run(self._client.score_group(samples, id))

    def service(self) -> dict[str, Any]:
        """Return the service's description; see ``RewardClient.service``."""
        return self._thread.run(self._client.service())


class LoopThread:
    """Run coroutines on the event loop of a background thread, which the first call starts. Safe for threads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result."""
        waiting = asyncio.run_coroutine_threadsafe(work, self._running_loop())
        try:
            return waiting.result()
        except BaseException:  # a KeyboardInterrupt, for example: nobody waits for the result any longer
            waiting.cancel()
            raise

    def iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """Yield the items of a generator, and close it."""
        try:
            while True:
                try:
                    yield self.run(items.__anext__())
                except StopAsyncIteration:
                    return
        finally:
            self.run(items.aclose())

    def stop(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Run ``last`` and end the thread, if there is one; a later call starts another."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None:
            return
        try:
            if last is not None:
                asyncio.run_coroutine_threadsafe(last(), loop).result()
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
                self._thread.start()
            return self._loop
