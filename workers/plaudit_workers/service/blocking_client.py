"""``SyncRewardClient``: ``RewardClient`` for programs without an event loop; it runs one in a background thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from plaudit_wire.messages import Service
from plaudit_wire.redis import RedisAddress
from plaudit_workers.service.client import Result, RewardClient, SampleLike

T = TypeVar("T")


class SyncRewardClient:
    """Score from one thread, as a context; arguments and methods are those of ``RewardClient``."""

    def __init__(self, url: str | RedisAddress, **arguments: Any) -> None:
        self._client = RewardClient(url, **arguments)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="reward-client", daemon=True)

    @property
    def session(self) -> str:
        """Return the name of the session."""
        return self._client.session

    @property
    def service(self) -> Service:
        """Return the offer of the run."""
        return self._client.service

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._do(self._client.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._do(self._client.__aexit__(kind, error, trace))
        finally:
            self._stop()

    def submit(self, samples: Iterable[SampleLike]) -> list[str]:
        """Submit samples; see ``RewardClient.submit``."""
        return self._do(self._client.submit(samples))

    def submit_group(self, samples: Sequence[SampleLike], id: str = "") -> str:  # noqa: A002
        """Submit a group; see ``RewardClient.submit_group``."""
        return self._do(self._client.submit_group(samples, id))

    def results(self, *, follow: bool = False) -> Iterator[Result]:
        """Yield results; see ``RewardClient.results``."""
        results = self._client.results(follow=follow)
        try:
            while True:
                try:
                    yield self._do(results.__anext__())
                except StopAsyncIteration:
                    return
        finally:
            self._do(results.aclose())

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
