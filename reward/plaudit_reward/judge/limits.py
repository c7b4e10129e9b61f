"""What may be asked of an endpoint, and the budget that says so: one over all workers, or a process's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

TRAVEL_S = 1.0
"""A request may reach the endpoint so much later than it was sent, and still no 60 s hold more than allowed there."""


@dataclass(frozen=True)
class Limits:
    """Limits of one endpoint; None = none of that kind."""

    requests: int | None = None
    """Requests in any window."""
    tokens: int | None = None
    """Tokens, asked and answered, in any window."""
    concurrency: int | None = None
    """Requests at a time."""
    window_s: float = 60.0 + TRAVEL_S

    @property
    def rated(self) -> bool:
        """Whether anything is counted over time."""
        return self.requests is not None or self.tokens is not None

    @property
    def present(self) -> bool:
        """Whether there is any limit."""
        return self.rated or self.concurrency is not None


class Request(NamedTuple):
    """A request and what it takes of the budget of tokens."""

    id: str
    tokens: int


NEVER_SENT = -1
"""In place of a request's tokens: it was let through and not sent."""


class Settled(NamedTuple):
    """What has become known of a request since it was let through."""

    id: str
    tokens: int | None = None
    """What it really took; ``NEVER_SENT``; None = as reserved, or not known yet."""
    sent_ago_s: float | None = None
    """It was sent later than it was let through: so long ago. None = at once."""


@dataclass(frozen=True)
class Report:
    """What a worker tells its budget."""

    in_flight: int
    """Requests of this worker that run now."""
    settled: Sequence[Settled] = ()
    """What is not as it was reserved."""
    waiting: Sequence[Request] = ()
    """The first of those that wait."""
    num_waiting: int = 0
    """All that wait."""


class Passed(NamedTuple):
    """What a budget answers."""

    number: int
    """So many of ``Report.waiting`` may begin, from the first on."""
    again_s: float
    """Come again after so many seconds; 0 when all may begin."""


class Budget(Protocol):
    """Lets requests through within limits."""

    limits: Limits

    async def exchange(self, report: Report) -> Passed:
        """Takes a report and lets through what fits. A report that is sent twice lets nothing through twice.

        Raises:
            OSError: whatever keeps the budget is away; nothing is let through.
        """
        ...

    async def close(self) -> None:
        """Ends connections."""
        ...
