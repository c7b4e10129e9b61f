"""Time to live: an RLJob that ended goes by itself, when its user said after how long."""

from __future__ import annotations

from plaudit_operator.observed import Observed, seconds


def time_left_s(observed: Observed, now: float) -> float | None:
    """Seconds until an ended job is to be deleted; None: never."""
    ttl = (observed.job["spec"].get("lifecycle") or {}).get("ttlSecondsAfterFinished")
    ended = seconds(observed.status.get("completionTime"))
    return None if ttl is None or ended is None else ended + float(ttl) - now
