"""Replica counts and suspension: written only on transitions, never as part of an applied Deployment.

Suspended: no trainer, rollouts, reward workers or reward models; Redis, metrics and volumes stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from plaudit_operator import names
from plaudit_operator.actions import Action, Patch, Scale
from plaudit_operator.observed import Observed, annotations_of
from plaudit_workers.job.spec.rljob import Spec


def scale_actions(
    observed: Observed, counts: Mapping[str, int | None], spec: Spec, rests: Callable[[str], bool]
) -> list[Action]:
    """Corrections of replica counts, of Deployments that exist.

    Args:
        observed: the job.
        counts: of each Deployment while the job runs, by name; None: an autoscaler says, and nobody else.
        spec: of the job.
        rests: whether a Deployment is to have no pods now.
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
    """KEDA is paused by an annotation; an HPA leaves 0 alone, so the operator takes the Deployment there and back."""
    scaling = spec.reward.workers.autoscaling
    if scaling is None or scaling.provider == "keda":
        return None
    if resting:
        return 0
    return max(1, scaling.min_replicas) if present == 0 else None


def unpause_actions(observed: Observed, *, resting: bool) -> list[Action]:
    """Takes KEDA's annotation away at the resumption: what a manifest no longer holds is taken out by name."""
    if resting:
        return []
    paused = [item for item in observed.own("ScaledObject") if names.KEDA_PAUSE in annotations_of(item)]
    change = {"annotations": {names.KEDA_PAUSE: None}}
    return [
        Patch("ScaledObject", item["metadata"]["name"], {"metadata": {"uid": item["metadata"]["uid"], **change}})
        for item in paused
    ]


def suspend_job(job_name: str, uid: str, *, suspend: bool) -> Patch:
    """Stops the pods of an attempt, or lets them start."""
    return Patch("Job", job_name, {"metadata": {"uid": uid}, "spec": {"suspend": suspend}})
