"""Keep the budget of one process, for judges without limits and outside of a run. The same window log as in Redis."""

from __future__ import annotations

import math
import time

from plaudit_reward.endpoint.limits import NEVER_SENT, BudgetReport, Passed, RateLimits, ReservedRequest, Settled

_POLL_S = 0.05
_LONGEST_WAIT_S = 0.5


class LocalBudget:
    """Admit the requests of one process; ``RateLimits()`` admits everything."""

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
                    wait_s = self._oldest_s + self.limits.window_s - now if self._log else _POLL_S
                    return Passed(passed, min(max(wait_s, 0.001), _LONGEST_WAIT_S))
                if self.limits.rated:
                    self._log[request.id] = now, request.tokens
                    self._tokens += request.tokens
            in_flight += 1
        return Passed(len(report.waiting), 0.0)

    async def close(self) -> None:
        """Do nothing: there is no connection."""

    @property
    def _oldest_s(self) -> float:
        return min(sent for sent, _ in self._log.values())

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
