"""Define the limits of an endpoint, and the budget that enforces them: over all workers, or in a single process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

TRAVEL_S = 1.0
"""Longest way of a request to the endpoint for which no 60 s there contain more requests than allowed."""


@dataclass(frozen=True)
class RateLimits:
    """Limits of one endpoint; None: unlimited."""

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
    """A request and the tokens that it reserves."""

    id: str
    tokens: int


NEVER_SENT = -1
"""In place of a request's tokens: it was admitted and never sent."""


class Settled(NamedTuple):
    """News of an admitted request."""

    id: str
    tokens: int | None = None
    """Its real cost, or ``NEVER_SENT``; None: as reserved, or not known yet."""
    sent_ago_s: float | None = None
    """Seconds since it was sent, if that was later than its admission; None: at once."""


@dataclass(frozen=True)
class BudgetReport:
    """A worker's report to its budget."""

    in_flight: int
    """Requests of this worker in flight."""
    settled: Sequence[Settled] = ()
    """Requests that cost something other than they reserved, or were sent late."""
    waiting: Sequence[ReservedRequest] = ()
    """The first of the waiting requests."""
    num_waiting: int = 0
    """The number of all waiting requests."""


class Passed(NamedTuple):
    """A budget's reply."""

    number: int
    """Number of requests of ``BudgetReport.waiting`` that are admitted, oldest first."""
    again_s: float
    """Seconds until the next exchange is due; 0 when all were admitted."""


class Budget(Protocol):
    """Admit requests within limits."""

    limits: RateLimits

    async def exchange(self, report: BudgetReport) -> Passed:
        """Take a report and admit what fits. A report sent twice admits nothing twice.

        Raises:
            OSError: the budget's storage is unavailable; nothing was admitted.
        """
        ...

    async def close(self) -> None:
        """Close connections."""
        ...
