"""How deep and old the queues were, who worked, how full Redis was: the looks of the last hour, in bounded memory."""

from __future__ import annotations

from collections import deque

from plaudit_metrics.sources.run_snapshot import RunSnapshot

MOST_LOOKS = 1800
"""An hour of looks, one every two seconds."""


class QueueHistory:
    """The newest looks at a run's snapshot; the oldest go first.

    Args:
        limit: how many are kept.
    """

    def __init__(self, limit: int = MOST_LOOKS) -> None:
        self._looks: deque[RunSnapshot] = deque(maxlen=limit)

    def add(self, seen: RunSnapshot) -> None:
        """Keeps one look."""
        self._looks.append(seen)

    def after(self, time: float) -> list[RunSnapshot]:
        """The looks later than a point in time (seconds since the epoch, Redis's clock), oldest first."""
        return [seen for seen in self._looks if seen.time > time]
