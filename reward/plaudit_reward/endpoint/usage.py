"""Count the use of an endpoint (requests by result, tokens) and of a cache (hits, misses).

Each worker counts for itself and adds its counts to the sums of all workers in Redis, which the metrics service reads
(``plaudit_wire.names``). A killed worker loses the counts of its last two seconds, never a sample.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable

from redis.asyncio import Redis
from redis.exceptions import RedisError

from plaudit_reward.http.errors import NoResponseError
from plaudit_reward.http.response import Response
from plaudit_wire.errors import CallTimeoutError
from plaudit_wire.logs import get_logger
from plaudit_wire.names import Names

logger = get_logger(__name__)

_REPORT_EVERY_S = 2.0


class EndpointUsage:
    """Count the requests, tokens and cache hits of one scorer in one worker since the last report.

    Attributes:
        requests: by HTTP status, ``timeout`` or ``unreachable``.
        tokens: ``prompt`` and ``completion``.
        cache: ``cache_hits`` and ``cache_misses``.
    """

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.cache: Counter[str] = Counter()

    def count_request(self, status: str) -> None:
        """Count one request."""
        self.requests[status] += 1

    async def counted(self, request: Awaitable[Response]) -> Response:
        """Await a request and count how it ended. Raises what the request raises."""
        try:
            response = await request
        except CallTimeoutError:
            self.count_request("timeout")
            raise
        except NoResponseError:
            self.count_request("unreachable")
            raise
        self.count_request(str(response.status))
        return response

    def count_tokens(self, prompt: int, completion: int) -> None:
        """Count the tokens that the endpoint reports for one request."""
        self.tokens["prompt"] += prompt
        self.tokens["completion"] += completion


class UsageReport:
    """Add a worker's counts to the run's every two seconds and at the end.

    Args:
        usage: its counts; reduced by what was reported.
        client: of the run's Redis; closed here.
    """

    def __init__(self, scorer: str, usage: EndpointUsage, client: Redis, run: str) -> None:
        self._scorer = scorer
        self._usage = usage
        self._client = client
        self._keys = Names(run)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to report."""
        self._task = asyncio.create_task(self._go_on())

    async def stop(self) -> None:
        """Report the remaining counts and close the connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._send()
        await self._client.aclose()

    async def _go_on(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_EVERY_S)
            await self._send()

    async def _send(self) -> None:
        requests, tokens = Counter(self._usage.requests), Counter(self._usage.tokens)
        cache = Counter(self._usage.cache)
        if not requests and not tokens and not cache:
            return
        try:
            async with self._client.pipeline(transaction=True) as pipeline:
                for status, count in requests.items():
                    pipeline.hincrby(self._keys.judges, f"{self._scorer}:{status}", count)
                for kind, count in tokens.items():
                    pipeline.hincrby(self._keys.judge_tokens, f"{self._scorer}:{kind}", count)
                for read, count in cache.items():
                    pipeline.hincrby(self._keys.counters, f"{read}:{self._scorer}", count)
                await pipeline.execute()
        except (RedisError, OSError) as error:
            logger.warning("Redis is unavailable; keeping a scorer's counts until it returns", error=str(error))
            return
        self._usage.requests -= requests
        self._usage.tokens -= tokens
        self._usage.cache -= cache
