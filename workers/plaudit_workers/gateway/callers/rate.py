"""Bound the samples that each token may submit in a minute."""

from __future__ import annotations

import time
from collections.abc import Callable

_BURST_S = 10.0
"""Seconds' worth of samples that a caller may submit at once after a pause."""


class SampleRate:
    """Limit each caller's samples at one gateway by a token bucket.

    A request is admitted whole while anything is left, so that it need not be smaller than the burst; what it takes too
    much must be earned before the next one.
    """

    def __init__(self, per_minute: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_minute / 60 if per_minute else None
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}
        """What each caller has left, and when that was computed."""

    def take(self, caller: str, count: int) -> float:
        """Take samples for a request; return 0, or the seconds after which it would be admitted."""
        if self._per_s is None:
            return 0.0
        now, burst = self._clock(), max(1.0, self._per_s * _BURST_S)
        left, since = self._left.get(caller, (burst, now))
        left = min(burst, left + (now - since) * self._per_s)
        admitted = left > 0
        self._left[caller] = (left - count if admitted else left, now)
        return 0.0 if admitted else max(-left / self._per_s, 1 / self._per_s)
