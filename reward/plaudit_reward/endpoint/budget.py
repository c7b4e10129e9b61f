"""Keep the requests to an endpoint within its limits.

A worker's ``Limiter`` queues its requests, first in, first out, until a budget admits them: ``RedisBudget`` for all
workers together, ``LocalBudget`` for judges without limits and outside of a run. At most one exchange with the budget
is in flight, and it covers all waiting requests. Nothing polls while none waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Final, NamedTuple, Protocol

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from plaudit_reward.scorer import ALWAYS_ROOM
from plaudit_wire.backoff import backoff_s
from plaudit_wire.errors import InfrastructureError
from plaudit_wire.logs import get_logger
from plaudit_wire.redis import FunctionLibrary, is_missing, missing_error

logger = get_logger(__name__)
TRAVEL_S = 1.0
"""Longest way of a request to the endpoint for which no 60 s there contain more requests than allowed."""


@dataclass(frozen=True)
class RateLimits:
    """Limit the requests to one endpoint; None: unlimited."""

    requests: int | None = None
    """Requests per window."""
    tokens: int | None = None
    """Tokens per window, of prompts and answers."""
    concurrency: int | None = None
    """Requests at a time."""
    window_s: float = 60.0 + TRAVEL_S

    @property
    def rated(self) -> bool:
        """Return True where requests or tokens are limited over time."""
        return self.requests is not None or self.tokens is not None

    @property
    def present(self) -> bool:
        """Return True where there is any limit."""
        return self.rated or self.concurrency is not None


class ReservedRequest(NamedTuple):
    """Name a request and the tokens that it reserves."""

    id: str
    tokens: int


NEVER_SENT = -1
"""In place of a request's tokens: it was admitted and never sent."""


class Settled(NamedTuple):
    """Report news of an admitted request."""

    id: str
    tokens: int | None = None
    """Its real cost, or ``NEVER_SENT``; None: as reserved, or not known yet."""
    sent_ago_s: float | None = None
    """Seconds since it was sent, if that was later than its admission; None: at once."""


@dataclass(frozen=True)
class BudgetReport:
    """Report a worker's requests to its budget."""

    in_flight: int
    """Requests of this worker in flight."""
    settled: Sequence[Settled] = ()
    """Requests that cost something other than they reserved, or were sent late."""
    waiting: Sequence[ReservedRequest] = ()
    """The first of the waiting requests."""
    num_waiting: int = 0
    """The number of all waiting requests."""


class Passed(NamedTuple):
    """Hold a budget's reply."""

    number: int
    """Number of requests of ``BudgetReport.waiting`` that are admitted, oldest first."""
    again_s: float
    """Seconds until the next exchange is due; 0 when all were admitted."""


class Budget(Protocol):
    """Admit requests within limits."""

    limits: RateLimits

    async def exchange(self, report: BudgetReport) -> Passed:
        """Take a report and admit what fits. A report sent twice admits nothing twice.

        Raises ``OSError`` if the budget's storage is unavailable; nothing was admitted then.
        """

    async def close(self) -> None:
        """Close connections."""


_POLL_S = 0.05
_LONGEST_WAIT_S = 0.5


class LocalBudget:
    """Admit the requests of one process by the same window log as in Redis; ``RateLimits()`` admits everything."""

    def __init__(self, limits: RateLimits) -> None:
        self.limits = limits
        self._log: dict[str, tuple[float, int]] = {}
        """Request → time of sending, and tokens."""
        self._tokens = 0

    async def exchange(self, report: BudgetReport) -> Passed:
        """See ``Budget``."""
        now = time.monotonic()
        for settled in report.settled:
            self._settle(settled)
        for id_ in [id_ for id_, (sent, _) in self._log.items() if sent <= now - self.limits.window_s]:
            self._forget(id_)
        in_flight = report.in_flight
        for passed, request in enumerate(report.waiting):
            if request.id not in self._log:
                if not self._fits(request, in_flight):
                    oldest = min((sent for sent, _ in self._log.values()), default=None)
                    wait_s = _POLL_S if oldest is None else oldest + self.limits.window_s - now
                    return Passed(passed, min(max(wait_s, 0.001), _LONGEST_WAIT_S))
                if self.limits.rated:
                    self._log[request.id] = now, request.tokens
                    self._tokens += request.tokens
            in_flight += 1
        return Passed(len(report.waiting), 0.0)

    async def close(self) -> None:
        """Do nothing: there is no connection."""

    def _fits(self, request: ReservedRequest, in_flight: int) -> bool:
        limits = self.limits
        most_tokens = math.inf if limits.tokens is None else limits.tokens
        return (
            (limits.requests is None or len(self._log) < limits.requests)
            and (limits.concurrency is None or in_flight < limits.concurrency)
            # A request larger than the whole budget is admitted when the window is empty.
            and self._tokens + max(1, min(request.tokens, most_tokens)) <= most_tokens
        )

    def _settle(self, settled: Settled) -> None:
        if settled.tokens == NEVER_SENT:
            self._forget(settled.id)
        elif settled.id in self._log:
            sent, tokens = self._log[settled.id]
            if settled.sent_ago_s is not None:
                sent = max(sent, time.monotonic() - settled.sent_ago_s)
            cost = tokens if settled.tokens is None else settled.tokens
            self._log[settled.id] = sent, cost
            self._tokens += cost - tokens

    def _forget(self, id_: str) -> None:
        if id_ in self._log:
            self._tokens -= self._log.pop(id_)[1]


LEASE_S = 15.0
"""Seconds for which the requests in flight of a killed worker still count."""
BUDGET: Final = FunctionLibrary(
    "plaudit_budget", {"exchange": (files("plaudit_reward.endpoint") / "lua" / "budget.lua").read_text()}
)
"""The function that decides, for Redis."""
_SECOND = 1_000_000
_AS_RESERVED = -2
_AT_ONCE = -1


class RedisBudget:
    """Exchange a worker's reports with a shared budget, which Redis stores and times. ``lua/budget.lua`` decides.

    All workers that use the same ``key`` share the budget, with the same limits; its hash tag routes it on a cluster.
    Closes ``client``.
    """

    def __init__(self, client: Redis, key: str, worker: str, limits: RateLimits, *, lease_s: float = LEASE_S) -> None:
        self.limits = limits
        self._client = client
        self._key = key
        # A name of its own for each start: requests of a killed process are not this one's.
        self._worker = f"{worker}-{os.urandom(4).hex()}"
        self._lease_s = lease_s

    async def exchange(self, report: BudgetReport) -> Passed:
        """See ``Budget``."""
        limits = self.limits
        arguments: list[Any] = [
            self._worker,
            round(limits.window_s * _SECOND),
            round(self._lease_s * _SECOND),
            limits.requests or 0,
            limits.tokens or 0,
            limits.concurrency or 0,
            report.in_flight,
            report.num_waiting,
            len(report.settled),
        ]
        for settled in report.settled:
            tokens = _AS_RESERVED if settled.tokens is None else settled.tokens
            ago = _AT_ONCE if settled.sent_ago_s is None else round(settled.sent_ago_s * _SECOND)
            arguments += (f"{settled.id}@{self._worker}", tokens, ago)
        for request in report.waiting:
            arguments += (f"{request.id}@{self._worker}", request.tokens)
        try:
            passed, again = await self._call(arguments)
        except (RedisConnectionError, RedisTimeoutError, OSError) as error:
            raise ConnectionError(str(error)) from error
        except RedisError as error:
            raise InfrastructureError(f"the Redis of the limits refuses: {error}") from error
        return Passed(passed, again / _SECOND)

    async def _call(self, arguments: list[Any]) -> Any:
        function = BUDGET.functions["exchange"]
        call: Any = self._client.fcall
        try:
            return await call(function, 1, self._key, *arguments)
        except ResponseError as error:
            if not is_missing(error):
                raise
        try:
            await self._client.function_load(BUDGET.text, replace=True)
        except ResponseError as error:
            raise missing_error(BUDGET, error) from error
        return await call(function, 1, self._key, *arguments)

    async def close(self) -> None:
        """Close the connection."""
        await self._client.aclose()


_MOST_AT_A_TIME = 256
_LEAST_AT_A_TIME = 4
"""Bounds on the requests that one exchange asks for. It asks for twice as many as the last one let through."""
_AT_ONCE_S = 0.1
_RENEW_EVERY_S = 4.0
_SOON_S = 2.0
_LEAST_LOOK_AHEAD = 16
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_LONGEST_HOLD_S = 60.0
_RECENT_RESPONSES = 32
_HOLDING_SHARE = 0.25


@dataclass
class Passage:
    """Track an admitted request."""

    request: ReservedRequest
    tokens: int
    """Its cost: the reservation until the answer reports the real one. ``NEVER_SENT`` returns the whole reservation."""
    passed_s: float = 0.0
    """Earliest time of its admission; monotonic seconds."""


@dataclass
class _Waiting:
    request: ReservedRequest
    passed: asyncio.Future[float] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Limiter:
    """Admit a worker's requests within a budget."""

    def __init__(self, budget: Budget, name: str) -> None:
        self._budget = budget
        self._name = name
        self._ids = itertools.count()
        self._waiting: deque[_Waiting] = deque()
        self._settled: list[Settled] = []
        self._sent_late: list[tuple[str, float]] = []
        """Requests and when they were sent, monotonic seconds."""
        self._in_flight = 0
        self._at_a_time = _MOST_AT_A_TIME
        self._refused = False
        """The budget refused the first waiting request: only time or an ended request can change that."""
        self._held_from_s = self._held_until_s = 0.0
        self._refusals: deque[bool] = deque(maxlen=_RECENT_RESPONSES)
        self._passed_at: deque[float] = deque()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the exchanges with the budget."""
        self._task = asyncio.create_task(self._go_on())

    async def stop(self) -> None:
        """Report to the budget that nothing is in flight; fail all waiting requests."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail(InfrastructureError(f"scorer {self._name} was closed"))
        with contextlib.suppress(OSError, InfrastructureError):  # the lease expires anyway
            await self._budget.exchange(BudgetReport(0, self._settled))
        await self._budget.close()

    async def enter(self, tokens: int) -> Passage:
        """Wait until a request may be sent; ``leave`` ends it. The caller sets ``Passage.tokens`` to its real cost.

        Raises ``InfrastructureError`` if the budget failed.
        """
        if not self._budget.limits.present and time.monotonic() >= self._held_until_s and not self._waiting:
            self._in_flight += 1
            return Passage(ReservedRequest("", tokens), tokens)
        waiting = _Waiting(ReservedRequest(str(next(self._ids)), tokens))
        self._waiting.append(waiting)
        if not self._refused:
            self._news.set()
        try:
            passed_s = await waiting.passed
        except asyncio.CancelledError:
            passed = waiting.passed
            if passed.done() and not passed.cancelled() and passed.exception() is None:
                self.leave(Passage(waiting.request, NEVER_SENT))
            raise
        return Passage(waiting.request, tokens, passed_s)

    @property
    def rated(self) -> bool:
        """Return True where requests or tokens are limited over time, so that the moment of sending counts."""
        return self._budget.limits.rated

    def sent(self, passage: Passage) -> None:
        """Record that the request left this process; if that took a while, its window starts now."""
        now = time.monotonic()
        if now - passage.passed_s > _AT_ONCE_S:
            self._sent_late.append((passage.request.id, now))
            self._news.set()

    def leave(self, passage: Passage) -> None:
        """Record that the request has ended."""
        self._in_flight -= 1
        if not self._budget.limits.present:
            return
        if passage.tokens != passage.request.tokens:
            self._settled.append(Settled(passage.request.id, passage.tokens))
        self._news.set()

    def accepted(self) -> None:
        """Record that the endpoint worked on a request."""
        self._refusals.append(False)

    def refused(self, retry_after_s: float) -> None:
        """Record that the endpoint refused a request and asked for a pause.

        One refusal among many accepted requests delays its own sample only. Once a quarter of the last responses are
        refusals, no request passes until the pause is over, a minute at most.
        """
        self._refusals.append(True)
        if sum(self._refusals) < _HOLDING_SHARE * len(self._refusals):
            return
        now = time.monotonic()
        if now >= self._held_until_s:
            self._held_from_s = now
        self._held_until_s = max(self._held_until_s, now + min(retry_after_s, _LONGEST_HOLD_S))

    def held_s(self, start_s: float, end_s: float) -> float:
        """Return how much of a span of monotonic time lies in the newest pause that the endpoint asked for."""
        return max(0.0, min(end_s, self._held_until_s) - max(start_s, self._held_from_s))

    def room(self) -> int:
        """Return how many more requests could be admitted soon, estimated from the last two seconds."""
        if not self._budget.limits.present and not self._waiting:
            return ALWAYS_ROOM
        self._forget_old_passes()
        return max(0, _LEAST_LOOK_AHEAD + len(self._passed_at) - len(self._waiting))

    async def _go_on(self) -> None:
        failures = 0
        while True:
            held_s = self._held_until_s - time.monotonic()
            if held_s > 0:
                await asyncio.sleep(min(held_s, _RENEW_EVERY_S))
            self._news.clear()
            try:
                again_s = await self._exchange(asking=time.monotonic() >= self._held_until_s)
                failures = 0
            except OSError as error:
                failures += 1
                fields = {"scorer": self._name, "error": str(error), "waiting": len(self._waiting)}
                logger.warning("limits of an endpoint are unavailable; its requests wait", **fields)
                await asyncio.sleep(backoff_s(failures, _FIRST_PAUSE_S, _LONGEST_PAUSE_S))
                continue
            except Exception as error:  # the boundary to the waiting requests: each of them raises it
                logger.exception("limits of an endpoint failed; its waiting requests fail")
                self._fail(InfrastructureError(f"scorer {self._name}: its limits failed: {error}"))
                again_s = _LONGEST_PAUSE_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(again_s if again_s < math.inf else None):
                    await self._news.wait()

    async def _exchange(self, *, asking: bool) -> float:
        """Run one exchange; return the seconds until the next is due even if nothing changes."""
        self._forget_ended()
        asked = [w for w in itertools.islice(self._waiting, self._at_a_time) if not w.passed.done()] if asking else []
        settled, self._settled = self._settled, []
        late, self._sent_late = self._sent_late, []
        now = time.monotonic()
        report = BudgetReport(
            self._in_flight,
            [*(Settled(id_, sent_ago_s=now - sent_s) for id_, sent_s in late), *settled],
            [waiting.request for waiting in asked],
            len(self._waiting) if asking else 0,
        )
        try:
            passed = await self._budget.exchange(report)
        except BaseException:
            self._settled, self._sent_late = settled + self._settled, late + self._sent_late
            raise
        self._let_through(asked[: passed.number], now)
        self._forget_ended()
        self._refused = passed.number < len(asked)
        if asked:
            self._at_a_time = min(_MOST_AT_A_TIME, max(_LEAST_AT_A_TIME, 2 * passed.number))
        if self._refused:
            return passed.again_s
        return 0.0 if self._waiting else _RENEW_EVERY_S if self._in_flight else math.inf

    def _let_through(self, passed: list[_Waiting], now: float) -> None:
        for waiting in passed:
            self._in_flight += 1
            if waiting.passed.done():  # cancelled during the exchange
                self.leave(Passage(waiting.request, NEVER_SENT))
            else:
                waiting.passed.set_result(now)
                self._passed_at.append(now)
        self._forget_old_passes()

    def _forget_ended(self) -> None:
        """Remove admitted and cancelled requests from the head of the queue."""
        while self._waiting and self._waiting[0].passed.done():
            self._waiting.popleft()

    def _forget_old_passes(self) -> None:
        oldest = time.monotonic() - _SOON_S
        while self._passed_at and self._passed_at[0] < oldest:
            self._passed_at.popleft()

    def _fail(self, error: Exception) -> None:
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.passed.done():
                waiting.passed.set_exception(error)
