"""Jobs that start whole or not at all (``scheduling.gang``, ``scheduling.queueName``): whether they have their place.

A job has it while one of its trainer's or rollouts' pods is bound to a node: the scheduler, or Kueue, bound all of them
together. Until then the roles outside the group rest, so that two jobs never take each other's last GPU. Suspended or
preempted, it gives its place back, Redis's too, and waits for it anew.
"""

from __future__ import annotations

from typing import Literal

from plaudit_operator.observed import Observed
from plaudit_operator.pod_state import is_gated, is_leaving, is_over, is_scheduled

Wait = Literal["", "room", "queue"]
"""For what a job waits: for nothing, for room for all of its group, for its queue."""


def awaited(observed: Observed) -> Wait:
    """For what a job waits that is not suspended. Both fields are fixed while the job exists."""
    scheduling = observed.job["spec"].get("scheduling") or {}
    queue = scheduling.get("queueName", "")
    if not queue and scheduling.get("gang", "none") == "none":
        return ""
    pods = [pod for role in ("trainer", "rollout") for pod in observed.pods_of(role)]
    pods = [pod for pod in pods if not (is_leaving(pod) or is_over(pod))]
    if any(map(is_scheduled, pods)):
        return ""
    return "queue" if queue and (not pods or any(map(is_gated, pods))) else "room"
