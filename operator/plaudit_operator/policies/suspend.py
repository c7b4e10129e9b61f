"""Set replica counts and suspend jobs: only on transitions, never as part of an applied Deployment.

Suspended: no trainer, rollouts, reward workers or reward models; Redis, metrics and volumes stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from plaudit_operator.actions import Action, Patch, Scale
from plaudit_operator.observed import Observed
from plaudit_workers.job.spec.rljob import Spec


def scale_actions(
    observed: Observed, counts: Mapping[str, int | None], spec: Spec, rests: Callable[[str], bool]
) -> list[Action]:
    """Return corrections of the replica counts of existing Deployments.

    Args:
        counts: replicas by Deployment while the job runs; None if only an autoscaler sets them.
        rests: returns True if a Deployment is to have no pods now.
    """
    actions: list[Action] = []
    for name, count in counts.items():
        deployment = observed.child("Deployment", name)
        if deployment is None or deployment["metadata"].get("deletionTimestamp"):
            continue
        present = int(deployment["spec"].get("replicas", 1))
        wanted = 0 if rests(name) else count
        if count is None:
            wanted = _of_autoscaler(spec, present, resting=rests(name))
        if wanted is not None and wanted != present:
            actions.append(Scale("Deployment", name, wanted))
    return actions


def _of_autoscaler(spec: Spec, present: int, *, resting: bool) -> int | None:
    """Return a correction for an HPA, which ignores 0 replicas; None for KEDA, which an annotation pauses."""
    scaling = spec.reward.workers.autoscaling
    if scaling is None or scaling.provider == "keda":
        return None
    if resting:
        return 0
    return max(1, scaling.min_replicas) if present == 0 else None


def suspend_job(job_name: str, uid: str, *, suspend: bool) -> Patch:
    """Return the patch that stops the pods of an attempt, or lets them start."""
    return Patch("Job", job_name, {"metadata": {"uid": uid}, "spec": {"suspend": suspend}})
