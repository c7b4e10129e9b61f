"""Keep the run's snapshots of the last hour, in bounded memory."""

from __future__ import annotations

from collections import deque

from plaudit_metrics.sources.run_snapshot import RunSnapshot

MOST_LOOKS = 1800
"""An hour of snapshots, one every two seconds."""


class QueueHistory:
    """Keep the newest ``limit`` snapshots of a run."""

    def __init__(self, limit: int = MOST_LOOKS) -> None:
        self._looks: deque[RunSnapshot] = deque(maxlen=limit)

    def add(self, seen: RunSnapshot) -> None:
        """Add one snapshot."""
        self._looks.append(seen)

    def after(self, time: float) -> list[RunSnapshot]:
        """Return the snapshots after a point in time (seconds since the epoch, Redis's clock), oldest first."""
        return [seen for seen in self._looks if seen.time > time]
