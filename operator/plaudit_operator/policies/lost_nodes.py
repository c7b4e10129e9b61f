"""A lost node keeps its pods: StatefulSet and Job pods stay Terminating until it is back.

A trainer's or rollout's pod there is deleted by force when its grace is over: the run's incarnation fences a zombie.
Redis's never is: two of them on one volume would be worse than waiting.
"""

from __future__ import annotations

from plaudit_operator.actions import Delete
from plaudit_operator.observed import Observed, seconds
from plaudit_operator.pod_state import is_disrupted

_AFTER_GRACE_S = 30.0
_ROLES = ("trainer", "rollout")


def lost_pods(observed: Observed, now: float) -> tuple[list[Delete], float | None]:
    """Deletions by force that are due, and seconds until the next one."""
    due, waits = [], []
    for role in _ROLES:
        for pod in observed.pods_of(role):
            # deletionTimestamp is the end of the grace period already.
            leaving = seconds(pod["metadata"].get("deletionTimestamp"))
            if leaving is None or not is_disrupted(pod):
                continue
            left = leaving + _AFTER_GRACE_S - now
            if left > 0:
                waits.append(left)
            else:
                due.append(Delete("Pod", pod["metadata"]["name"], pod["metadata"]["uid"], grace_s=0))
    return due, min(waits, default=None)
