"""Admit requests to one endpoint, for judges and scorers over HTTP: the circuit first, then the limits.

Every refusal becomes a typed error: retry, stop asking, or give this sample up.

::

    InfrastructureError
    ├── EndpointRefusedError    401, 403, 404, 405, 407, a redirect: its address, key or model is wrong
    └── CircuitOpenError        no request was sent: too many had failed
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial

from redis.asyncio import Redis
from redis.exceptions import RedisError

from plaudit_reward.endpoint.budget import NEVER_SENT, Limiter, Passage
from plaudit_reward.http import NoResponseError, Response, retry_after_s
from plaudit_reward.scorer import Attempt
from plaudit_wire.backoff import backoff_s
from plaudit_wire.errors import BusyError, CallTimeoutError, DataError, InfrastructureError, ScoringError
from plaudit_wire.logs import get_logger
from plaudit_wire.names import Names

logger = get_logger(__name__)
_REFUSALS = frozenset({401, 403, 404, 405, 407})
_TRANSIENT = frozenset({408, 409, 425})


class EndpointRefusedError(InfrastructureError):
    """The endpoint refuses every request as configured; no sample is to blame."""


class CircuitOpenError(InfrastructureError):
    """No request was sent."""


def failure_of(
    url: str, status: int, headers: Mapping[str, str], message: str, remedies: Mapping[int, str]
) -> ScoringError:
    """Return the error for a response other than 200.

    ``headers`` are as for ``retry_after_s``; ``remedies`` say what to do about a status that refuses every request.
    """
    text = f"{url} responded {status}: {message}" if message else f"{url} responded {status}"
    wait_s = retry_after_s(headers)
    if status == 429 or (status == 503 and wait_s is not None):
        return BusyError(text, retry_after_s=wait_s)
    if status in _REFUSALS or status < 200 or 300 <= status < 400:
        remedy = remedies.get(status, "check the address")
        return EndpointRefusedError(f"{text} ({remedy})", retry_after_s=wait_s)
    if status >= 500 or status < 300 or status in _TRANSIENT:
        return InfrastructureError(text, retry_after_s=wait_s)
    return DataError(text)


FAILURES_IN_A_ROW = 5
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 15.0
_WHILE_PROBING_S = 1.0


class Circuit:
    """Stop one worker's requests to an endpoint that fails: the circuit is closed, open, or half open.

    ::

        closed ── 5 failures in a row, or one refusal (401, 403, 404) ──▶ open ── pause is over ──▶ half open
          ▲                                                                ▲                            │
          └──────────────────────── the probe gets a response ─────────────┼────────────────────────────┤
                                                                           └── it fails: pause doubled ─┘

    A 429 is not a failure: a busy endpoint is up. Nor is a request that fails after others, sent later or earlier, got
    a response while it was in flight: with hundreds in flight some hang at any time, and time out together.
    """

    def __init__(self, name: str, base_url: str) -> None:
        self._name = name
        self._base_url = base_url
        self._failures = 0
        self._last_failure = ""
        self._responded_at = -math.inf
        self._openings = 0
        """In a row, without a response between them."""
        self._probe_at: float | None = None
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Return True while requests are stopped, or only probes are sent."""
        return self._probe_at is not None

    @property
    def probe_due(self) -> bool:
        """Return True when it is half open and no probe is in flight."""
        return self._probe_at is not None and not self._probing and time.monotonic() >= self._probe_at

    def check(self) -> None:
        """Raise ``CircuitOpenError`` while requests are stopped."""
        if self._probe_at is None or self.probe_due:
            return
        wait_s = max(0.0, _WHILE_PROBING_S if self._probing else self._probe_at - time.monotonic())
        raise CircuitOpenError(f"{self._reason()}; next try in {wait_s:.0f} s", retry_after_s=wait_s)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Record the result of one request, which the block sends; raises ``CircuitOpenError`` as ``check`` does."""
        self.check()
        probe = self._probe_at is not None
        self._probing = probe
        sent_at = time.monotonic()
        try:
            yield
        except EndpointRefusedError as error:
            self._failed(str(error), probe, at_once=True)
            raise
        except BusyError:
            self._responded()
            raise
        except (InfrastructureError, CallTimeoutError) as error:
            if probe or self._responded_at <= sent_at:
                self._failed(str(error), probe)
            raise
        except Exception:
            self._responded()
            raise
        else:
            self._responded()
        finally:
            if probe:
                self._probing = False

    def _responded(self) -> None:
        if self._probe_at is not None:
            logger.warning("endpoint responds again", scorer=self._name, url=self._base_url)
        self._failures, self._openings, self._probe_at, self._responded_at = 0, 0, None, time.monotonic()

    def _failed(self, reason: str, probe: bool, *, at_once: bool = False) -> None:
        self._failures += 1
        if self._probe_at is not None and not probe:
            return  # the request was sent before the circuit opened
        if not probe and not at_once and self._failures < FAILURES_IN_A_ROW:
            return
        self._openings += 1
        pause_s = backoff_s(self._openings, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        # Workers that saw the same outage must not come back together.
        self._probe_at = time.monotonic() + random.uniform(0.75, 1.0) * pause_s
        self._last_failure = reason
        fields = {"scorer": self._name, "reason": self._reason(), "pause_s": round(pause_s, 1)}
        logger.warning("endpoint fails; requests to it stop", **fields)

    def _reason(self) -> str:
        if self._failures > 1:
            return f"endpoint {self._base_url}: {self._failures} failures in a row (last: {self._last_failure})"
        return f"endpoint {self._base_url}: {self._last_failure}"


_REPORT_EVERY_S = 2.0


class EndpointUsage:
    """Count the requests, tokens and cache hits of one scorer in one worker since the last report."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        """By HTTP status, ``timeout`` or ``unreachable``."""
        self.tokens: Counter[str] = Counter()
        """``prompt`` and ``completion``."""
        self.cache: Counter[str] = Counter()
        """``cache_hits`` and ``cache_misses``."""

    async def counted(self, request: Awaitable[Response]) -> Response:
        """Await a request and count how it ended. Raises what the request raises."""
        try:
            response = await request
        except CallTimeoutError:
            self.requests["timeout"] += 1
            raise
        except NoResponseError:
            self.requests["unreachable"] += 1
            raise
        self.requests[str(response.status)] += 1
        return response


class UsageReport:
    """Add a worker's counts to the sums of all workers in Redis, every two seconds and at the end.

    The metrics service reads them (``plaudit_wire.names``). A killed worker loses the counts of its last two seconds,
    never a sample. What was reported is subtracted from ``usage``; ``client`` is closed here.
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
        requests, tokens, cache = map(Counter, (self._usage.requests, self._usage.tokens, self._usage.cache))
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


class EndpointAccess:
    """Control one worker's access to an endpoint; start and stop the limiter and, in a run, the report of its usage."""

    def __init__(self, name: str, url: str, limiter: Limiter, report: UsageReport | None = None) -> None:
        self._limiter = limiter
        self._report = report
        self._circuit = Circuit(name, url)

    def start(self) -> None:
        """Start the limiter and the report."""
        self._limiter.start()
        if self._report is not None:
            self._report.start()

    @property
    def circuit_open(self) -> bool:
        """Return True while requests to the endpoint are stopped, or only probes are sent."""
        return self._circuit.is_open

    def room(self) -> int:
        """Return how many more requests may start soon: one, the probe, while the circuit is open."""
        if self._circuit.is_open:
            return 1 if self._circuit.probe_due else 0
        return self._limiter.room()

    @asynccontextmanager
    async def request(self, tokens: int, attempt: Attempt) -> AsyncIterator[Passage]:
        """Wait until a request may be sent; the block sends it and sets ``Passage.tokens`` to its real cost.

        Raises ``CircuitOpenError`` while requests are stopped, ``InfrastructureError`` if the limits failed.
        """
        self._circuit.check()
        began = time.monotonic()
        try:
            with attempt.waiting():
                passage = await self._limiter.enter(tokens)
        finally:
            attempt.held_s += self._limiter.held_s(began, time.monotonic())
        try:
            with self._circuit.call():
                yield passage
        except CircuitOpenError:
            passage.tokens = NEVER_SENT
            raise
        except (BusyError, EndpointRefusedError) as error:
            passage.tokens = 0
            self._limiter.refused(error.retry_after_s or 0.0)
            raise
        else:
            self._limiter.accepted()
        finally:
            self._limiter.leave(passage)

    def on_sent(self, passage: Passage) -> Callable[[], None] | None:
        """Return the function to call when the request has left this process; None where that moment does not count."""
        return partial(self._limiter.sent, passage) if self._limiter.rated else None

    async def stop(self) -> None:
        """Stop the limiter and the report."""
        await self._limiter.stop()
        if self._report is not None:
            await self._report.stop()
