"""Jobs that start all or nothing (``scheduling.gang``, ``scheduling.queueName``): decide whether they are scheduled.

A job counts as scheduled while a pod of its trainer or rollouts is bound to a node: the scheduler, or Kueue, binds all
of them together. Until then the roles outside the group have no pods, so that two jobs never take each other's last
GPU. A suspended or preempted job frees all resources of its group, Redis's too, and has to be scheduled again.
"""

from __future__ import annotations

from typing import Literal

from plaudit_operator.observed import Observed
from plaudit_operator.pod_state import is_gated, is_leaving, is_over, is_scheduled

GangWait = Literal["", "room", "queue"]
"""The reason to wait: none (empty), room for the whole group, or the queue."""


def awaited(observed: Observed) -> GangWait:
    """Return the reason why a job that is not suspended has to wait. Both fields are immutable."""
    scheduling = observed.job["spec"].get("scheduling") or {}
    queue = scheduling.get("queueName", "")
    if not queue and scheduling.get("gang", "none") == "none":
        return ""
    pods = [pod for role in ("trainer", "rollout") for pod in observed.pods_of(role)]
    pods = [pod for pod in pods if not (is_leaving(pod) or is_over(pod))]
    if any(map(is_scheduled, pods)):
        return ""
    return "queue" if queue and (not pods or any(map(is_gated, pods))) else "room"
