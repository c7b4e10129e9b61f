"""The mean over the newest values, however long ago they came."""

from __future__ import annotations

from collections import deque


class RecentMean:
    """Compute the mean of at least the newest ``size`` values; of batches, the oldest are dropped whole.

    A rate over a window of time is undefined between two steps that are further apart than the window. This is not.

    Args:
        least: fewer values than this have no mean.
    """

    def __init__(self, size: int, least: int = 1) -> None:
        self._size = size
        self._least = least
        self._batches: deque[tuple[float, int]] = deque()
        self._total = 0.0
        self._count = 0

    def add(self, total: float, count: int) -> None:
        """Add a batch: the sum and the number of its values."""
        if count <= 0:
            return
        self._batches.append((total, count))
        self._total += total
        self._count += count
        while self._count - self._batches[0][1] >= self._size:
            oldest_total, oldest_count = self._batches.popleft()
            self._total -= oldest_total
            self._count -= oldest_count

    @property
    def mean(self) -> float | None:
        """Return the mean; None with too few values."""
        return self._total / self._count if self._count >= self._least else None
