"""Queue a worker's requests to an endpoint until the budget admits them, first in, first out.

At most one exchange with the budget is in flight, and it covers all waiting requests. Nothing polls while none waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections import deque
from dataclasses import dataclass, field

from plaudit_reward.endpoint.limits import NEVER_SENT, Budget, BudgetReport, ReservedRequest, Settled
from plaudit_wire.errors import InfrastructureError
from plaudit_wire.logs import get_logger

logger = get_logger(__name__)

_ALWAYS_ROOM = 1_000_000
_MOST_AT_A_TIME = 256
_LEAST_AT_A_TIME = 4
"""Bounds on the requests that one exchange asks for. It asks for twice as many as the last one let through."""
_AT_ONCE_S = 0.1
_RENEW_EVERY_S = 4.0
_SOON_S = 2.0
_LEAST_LOOK_AHEAD = 16
_LONGEST_PAUSE_S = 2.0
_LONGEST_HOLD_S = 60.0
_RECENT_RESPONSES = 32
_HOLDING_SHARE = 0.25


@dataclass
class Passage:
    """An admitted request."""

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

        Raises:
            InfrastructureError: the budget failed.
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
            return _ALWAYS_ROOM
        self._forget_old_passes()
        return max(0, _LEAST_LOOK_AHEAD + len(self._passed_at) - len(self._waiting))

    async def _go_on(self) -> None:
        pause_s = 0.0
        while True:
            held_s = self._held_until_s - time.monotonic()
            if held_s > 0:
                await asyncio.sleep(min(held_s, _RENEW_EVERY_S))
            self._news.clear()
            try:
                again_s = await self._exchange(asking=time.monotonic() >= self._held_until_s)
                pause_s = 0.0
            except OSError as error:
                pause_s = again_s = min(_LONGEST_PAUSE_S, pause_s * 2 or 0.05)
                fields = {"scorer": self._name, "error": str(error), "waiting": len(self._waiting)}
                logger.warning("limits of an endpoint are unavailable; its requests wait", **fields)
                await asyncio.sleep(pause_s)
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
