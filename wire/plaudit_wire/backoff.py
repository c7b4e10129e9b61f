"""Compute the pause before the next attempt of something that failed."""

from __future__ import annotations

import math
import random

_MOST_DOUBLINGS = 64
"""More would overflow; by then every pause has reached its limit."""


def backoff_s(
    failures: int, first_s: float, longest_s: float = math.inf, *, jitter: tuple[float, float] = (1.0, 1.0)
) -> float:
    """Return the pause in seconds after 1 or more failures in a row: ``first_s``, doubled by each further failure.

    It is at most ``longest_s``, then multiplied by a random number from ``jitter``, so that many callers do not return
    together.
    """
    pause_s = min(longest_s, first_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS))
    low, high = jitter
    return pause_s if low == high == 1.0 else pause_s * random.uniform(low, high)
