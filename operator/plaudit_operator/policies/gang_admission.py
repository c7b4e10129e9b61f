"""Jobs that start all or nothing (``scheduling.gang``, ``scheduling.queueName``): decide whether they are scheduled.

A job has it while one of its trainer's or rollouts' pods is bound to a node: the scheduler, or Kueue, bound all of them
together. Until then the roles outside the group rest, so that two jobs never take each other's last GPU. Suspended or
preempted, it gives its place back, Redis's too, and waits for it anew.
"""

from __future__ import annotations

from typing import Literal

from plaudit_operator.observed import Observed
from plaudit_operator.pod_state import is_gated, is_leaving, is_over, is_scheduled

Wait = Literal["", "room", "queue"]
"""What a job waits for: nothing, room for its whole group, its queue."""


def awaited(observed: Observed) -> Wait:
    """Return what a job that is not suspended waits for. Both fields are immutable."""
    scheduling = observed.job["spec"].get("scheduling") or {}
    queue = scheduling.get("queueName", "")
    if not queue and scheduling.get("gang", "none") == "none":
        return ""
    pods = [pod for role in ("trainer", "rollout") for pod in observed.pods_of(role)]
    pods = [pod for pod in pods if not (is_leaving(pod) or is_over(pod))]
    if any(map(is_scheduled, pods)):
        return ""
    return "queue" if queue and (not pods or any(map(is_gated, pods))) else "room"
