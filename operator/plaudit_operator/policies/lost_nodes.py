"""A lost node keeps its pods: StatefulSet and Job pods stay Terminating until it is back.

Pods of the trainer, rollouts and reward models there are deleted by force, without their grace period: the run's
incarnation fences processes that still run, and a queue counts a pod until it is gone. Pods on a reachable node keep
their grace period. Redis pods are never deleted by force: two on one volume would corrupt it.
"""

from __future__ import annotations

from plaudit_operator.actions import Delete
from plaudit_operator.observed import Object, Observed, seconds
from plaudit_operator.pod_state import evicted_since, is_disrupted, is_node_lost

_AFTER_GRACE_S = 30.0
_AFTER_LOSS_S = 15.0
"""Grace period before pods are deleted by force: a node that returns within it ends its pods itself."""
_ROLES = ("trainer", "rollout", "model")


def lost_pods(observed: Observed, now: float) -> tuple[list[Delete], float | None]:
    """Return the forced deletions that are due, and the seconds until the next one."""
    due, waits = [], []
    for role in _ROLES:
        for pod in observed.pods_of(role):
            end = _forced_at(pod)
            if end is None:
                continue
            if end > now:
                waits.append(end - now)
            else:
                due.append(Delete("Pod", pod["metadata"]["name"], pod["metadata"]["uid"], grace_s=0))
    return due, min(waits, default=None)


def _forced_at(pod: Object) -> float | None:
    # deletionTimestamp is the end of the grace period already.
    leaving = seconds(pod["metadata"].get("deletionTimestamp"))
    if leaving is None or not is_disrupted(pod):
        return None
    evicted = evicted_since(pod)
    if evicted is not None and is_node_lost(pod):
        return min(leaving + _AFTER_GRACE_S, evicted + _AFTER_LOSS_S)
    return leaving + _AFTER_GRACE_S
