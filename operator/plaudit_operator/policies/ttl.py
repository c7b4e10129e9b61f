"""Delete an ended RLJob after ``lifecycle.ttlSecondsAfterFinished``."""

from __future__ import annotations

from plaudit_operator.observed import Observed, seconds


def time_left_s(observed: Observed, now: float) -> float | None:
    """Return the seconds until an ended job is deleted; None for never."""
    ttl = (observed.job["spec"].get("lifecycle") or {}).get("ttlSecondsAfterFinished")
    ended = seconds(observed.status.get("completionTime"))
    return None if ttl is None or ended is None else ended + float(ttl) - now
