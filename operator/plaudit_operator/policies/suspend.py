"""Replica counts and suspension: written only on transitions, never as part of an applied Deployment.

Suspended: no trainer, rollouts, reward workers or reward models; Redis, metrics and volumes stay.
"""

from __future__ import annotations

from collections.abc import Mapping

from plaudit_operator import names
from plaudit_operator.actions import Action, Patch, Scale
from plaudit_operator.observed import Observed
from plaudit_workers.job.rljob import Spec


def wanted_replicas(name: str, count: int | None, spec: Spec, job_name: str, *, suspended: bool) -> int | None:
    """Pods that a Deployment is to have; None: an autoscaler says, and nobody else.

    Args:
        name: of the Deployment.
        count: of a running job; None: an autoscaler's.
        spec: of the job.
        job_name: its name.
        suspended: whether it is to rest.
    """
    if name == names.role_object(job_name, "metrics"):
        return count
    if not suspended:
        return count
    scaling = spec.reward.workers.autoscaling
    paused_by_keda = count is None and scaling is not None and scaling.provider == "keda"
    return None if paused_by_keda else 0


def scale_actions(observed: Observed, counts: Mapping[str, int | None], spec: Spec, *, suspended: bool) -> list[Action]:
    """Corrections of replica counts, of Deployments that exist."""
    actions: list[Action] = []
    for name, count in counts.items():
        deployment = observed.child("Deployment", name)
        if deployment is None or deployment["metadata"].get("deletionTimestamp"):
            continue
        present = int(deployment["spec"].get("replicas", 1))
        wanted = wanted_replicas(name, count, spec, observed.name, suspended=suspended)
        if wanted is None and count is None and present == 0 and not suspended:
            wanted = _after_rest(spec)
        if wanted is not None and wanted != present:
            actions.append(Scale("Deployment", name, wanted))
    return actions


def _after_rest(spec: Spec) -> int | None:
    """An HPA leaves a Deployment of 0 alone, so the operator brings it back; KEDA does that itself."""
    scaling = spec.reward.workers.autoscaling
    return max(1, scaling.min_replicas) if scaling and scaling.provider == "hpa" else None


def suspend_job(job_name: str, uid: str, *, suspend: bool) -> Patch:
    """Stops the pods of an attempt, or lets them start."""
    return Patch("Job", job_name, {"metadata": {"uid": uid}, "spec": {"suspend": suspend}})
