"""``SyncRewardClient``: ``RewardClient`` for programs without an event loop; it runs one in a background thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from plaudit_client.blocking import LoopThread
from plaudit_wire.messages import Service
from plaudit_wire.redis import RedisAddress
from plaudit_workers.service.client import Result, RewardClient, SampleLike


class SyncRewardClient:
    """Score from one thread, as a context; arguments and methods are those of ``RewardClient``."""

    def __init__(self, url: str | RedisAddress, **arguments: Any) -> None:
        self._client = RewardClient(url, **arguments)
        self._thread = LoopThread("reward-client")

    @property
    def session(self) -> str:
        """Return the name of the session."""
        return self._client.session

    @property
    def service(self) -> Service:
        """Return the offer of the run."""
        return self._client.service

    def __enter__(self) -> Self:
        try:
            self._thread.run(self._client.__aenter__())
        except BaseException:
            self._thread.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.stop(lambda: self._client.__aexit__(kind, error, trace))

    def submit(self, samples: Iterable[SampleLike]) -> list[str]:
        """Submit samples; see ``RewardClient.submit``."""
        return self._thread.run(self._client.submit(samples))

    def submit_group(self, samples: Sequence[SampleLike], id: str = "") -> str:  # noqa: A002
        """Submit a group; see ``RewardClient.submit_group``."""
        return self._thread.run(self._client.submit_group(samples, id))

    def results(self, *, follow: bool = False) -> Iterator[Result]:
        """Yield results; see ``RewardClient.results``."""
        return self._thread.iterate(self._client.results(follow=follow))
