"""Predict the server's time of the next call; a time outside the prediction means that the clock was stepped.

Redis measures leases with its wall clock. A step forward by more than a lease would make the leases of living workers
look lapsed, a step back would keep those of dead ones alive. Each consumer compares that clock with its own monotonic
clock; the script of ``claim`` acts on it.
"""

from __future__ import annotations

from dataclasses import dataclass

_EARLY_S = 2.0
_LATE_S = 10.0
"""A call waits at most about 5 s before its caller gives up, so a later time is a step. Smaller steps shorten a lease
(``LEASE_S``) to no less than two renewals."""


@dataclass
class ServerTime:
    """Hold one consumer's last reading of the server's clock. Monotonic and server times in seconds."""

    answered: float | None = None
    sent: float = 0.0
    received: float = 0.0

    def expected(self, now: float) -> tuple[float, float] | None:
        """Return the earliest and the latest server time of a call that is sent ``now``; None before any answer."""
        if self.answered is None:
            return None
        return self.answered + (now - self.received) - _EARLY_S, self.answered + (now - self.sent) + _LATE_S

    def observe(self, answered: float, sent: float, received: float) -> None:
        """Record an answer."""
        self.answered, self.sent, self.received = answered, sent, received
