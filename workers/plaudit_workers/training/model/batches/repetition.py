"""Measure how much a response repeats itself: a sign of collapse that rewards may not show. Called by ``batch``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WIDTH = 4
"""Tokens of the runs that are compared."""
_FACTOR = 1_000_003
"""Odd: the products of 64-bit integers modulo 2**64 keep runs apart."""


def repeated_share(ids: NDArray[np.int32]) -> float:
    """Return the share of runs of ``WIDTH`` tokens that occurred before in the response: 0 to nearly 1.

    Args:
        ids: int32[T]; a response shorter than ``WIDTH`` has share 0.
    """
    count = ids.size - WIDTH + 1
    if count < 1:
        return 0.0
    runs = np.zeros(count, np.int64)
    for offset in range(WIDTH):
        runs = runs * _FACTOR + ids[offset : offset + count]
    return 1 - np.unique(runs).size / count
