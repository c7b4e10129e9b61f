"""Describe what a plan does (plain data, carried out by ``planning/apply.py``), and decide on deletions and scaling.

**After a job's end** ``lifecycle.cleanup`` deletes everything but the RLJob (All), keeps Redis (KeepTransport), or
keeps everything (None) but the broker of machines: these belong to it, and nobody needs them any more.

**A deleted job.** Its trainer finishes its update and saves, then Redis goes. Garbage collection deletes the children
of a deleted RLJob at once, also while no operator runs. Redis's StatefulSet and Service therefore name the trainer's
first pod as a second owner: an object is collected when all of its owners are gone. The trainer's grace period is
shortened from ten minutes to two, so that GPUs are free soon. To keep the last steps of a longer update, suspend a job
before deleting it.

**Orphans**, of a job that was deleted with ``--cascade=orphan`` and created again: the new job adopts them with their
run, whose processes do not notice, if its spec is the one that they were made from.

**A lost node** keeps its pods: StatefulSet and Job pods stay Terminating until it is back. Pods of the trainer,
rollouts and reward models there are deleted by force, without their grace period: the run's incarnation fences
processes that still run, and a queue counts a pod until it is gone. Pods on a reachable node keep their grace period.
Redis pods are never deleted by force: two on one volume would corrupt it.

**Replica counts** are set only on transitions, never as part of an applied Deployment. A suspended job has no trainer,
rollouts, reward workers, reward models or machines;
Redis, metrics and volumes stay. When a job gets fewer rollouts, those with
the fewest samples in flight leave: a ReplicaSet deletes pods that are not ready first, and then those with the lowest
``pod-deletion-cost``. The costs are written only right before a Deployment of rollouts is scaled down, so that a job at
rest causes no writes. Replicas of several pods are Jobs with numbers; the highest numbers leave.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from plaudit_job.spec.rljob import Spec
from plaudit_operator import names
from plaudit_operator.observed import Object, Observed, attempt_of, labels, owner_uid, recorded_run, seconds
from plaudit_operator.pod_state import is_disrupted, is_leaving, is_over, lost_since, sidecars_left
from plaudit_operator.runtime.kinds import CHILDREN

Manifest = dict[str, Any]
_GRACE_S = 120
_GRACE_OF_SIDECARS_S = 10
"""Of a trainer's pod whose process has ended: plain sidecars would hold its GPUs for the trainer's ten minutes."""
_OUTLIVING = ("StatefulSet", "Service")
"""Kinds of Redis's objects that a trainer needs to its end; its pod has mounted the Secret already."""
_AFTER_GRACE_S = 30.0
_AFTER_LOSS_S = 15.0
"""Grace period before pods are deleted by force: a node that returns within it ends its pods itself."""
_CHILDREN_KINDS = {kind.kind for kind in CHILDREN}


@dataclass(frozen=True)
class Create:
    """Create an object. ``replicas`` applies to Deployments, whose manifests omit it."""

    manifest: Manifest
    replicas: int | None = None
    first: bool = False
    """True to run before all other actions: frozen data is written before anything depends on it."""


@dataclass(frozen=True)
class Apply:
    """Restore an object of the job."""

    manifest: Manifest
    first: bool = False


@dataclass(frozen=True)
class Patch:
    """Change single fields of an object of the job."""

    kind: str
    name: str
    body: Manifest
    is_there: bool = True
    """False if the object may be missing, and all is well then."""


@dataclass(frozen=True)
class Scale:
    """Set the number of pods."""

    kind: str
    name: str
    replicas: int
    deletion_costs: Mapping[str, int] = field(default_factory=dict)
    """Costs by pod, written before: a ReplicaSet first deletes the pods of lower cost."""


@dataclass(frozen=True)
class Delete:
    """Delete the object with this uid; ``grace_s`` 0 deletes a pod by force."""

    kind: str
    name: str
    uid: str
    grace_s: int | None = None

    @classmethod
    def of(cls, kind: str, item: Object, grace_s: int | None = None) -> Delete:
        """Return the deletion of an object as it was observed."""
        return cls(kind, item["metadata"]["name"], item["metadata"]["uid"], grace_s)


@dataclass(frozen=True)
class EmitEvent:
    """Emit an event on the RLJob."""

    kind: str
    reason: str
    message: str


Action = Create | Apply | Patch | Scale | Delete


@dataclass(frozen=True)
class Plan:
    """The status to report, the actions to take now, and when to reconcile again even without an event."""

    status: Manifest
    actions: list[Action] = field(default_factory=list)
    requeue_after_s: float | None = None


def earliest(*waits: float | None) -> float | None:
    """Return the shortest of several waits, as far as there are any."""
    return min((wait for wait in waits if wait is not None), default=None)


def cleanup_actions(observed: Observed) -> list[Action]:
    """Return the deletions and stops that are due; empty once they are done."""
    policy = (observed.job["spec"].get("lifecycle") or {}).get("cleanup", "All")
    actions: list[Action] = [
        Delete.of("Pod", pod, grace_s=_GRACE_OF_SIDECARS_S)
        for pod in observed.pods_of("trainer")
        if sidecars_left(pod, "trainer") and _grace_s(pod) > _GRACE_OF_SIDECARS_S
    ]
    if policy == "None":  # the objects stay for inspection, but the trainer of a failed job is stopped
        jobs = [job for job in observed.jobs_of("trainer") if (job.get("status") or {}).get("active")]
        stopped = [suspend_job(job, suspend=True) for job in jobs if not job["spec"].get("suspend")]
        brokers = [each for each in observed.own("Deployment") if labels(each).get(names.LABEL_ROLE) == "sandboxes"]
        left = (Delete.of("Deployment", broker) for broker in brokers if not is_leaving(broker))
        return [*actions, *stopped, *left]
    kept = names.role_object(observed.name, "redis") if policy == "KeepTransport" else ""
    return actions + [
        Delete.of(kind.kind, child)
        for kind in CHILDREN
        for child in observed.own(kind.kind)
        if child["metadata"]["name"] != kept and not is_leaving(child)
    ]


def _grace_s(pod: Object) -> float:
    """Return the grace period of a pod's deletion; endless for one that is not being deleted."""
    grace_s = pod["metadata"].get("deletionGracePeriodSeconds")
    return math.inf if grace_s is None else float(grace_s)


def outliving_trainer(manifest: Manifest, observed: Observed) -> Manifest:
    """Return the manifest of a child, owned by the trainer's first pod too if the trainer needs it to its end."""
    if manifest["kind"] not in _OUTLIVING or labels(manifest).get(names.LABEL_ROLE) != "redis":
        return manifest
    pods = [pod for pod in observed.pods_of("trainer") if not is_leaving(pod)]
    if not pods:
        return manifest
    first = min(pods, key=lambda pod: (-attempt_of(pod), str(pod["metadata"]["name"])))["metadata"]
    owner = {"apiVersion": "v1", "kind": "Pod", "name": first["name"], "uid": first["uid"]}
    metadata = manifest["metadata"]
    return {**manifest, "metadata": {**metadata, "ownerReferences": [*metadata["ownerReferences"], owner]}}


def left_behind(observed: Observed) -> list[Object]:
    """Return the children of an earlier job of this name that have no controller any more, and stay.

    Redis of a job that was deleted with all it owns has none either for a while, and goes with the trainer's pod.
    """
    free = [child for child in observed.children.values() if _is_free(child)]
    if not free:
        return free
    bare = [child for child in free if not follows_a_pod(child)]
    config = observed.children.get(("ConfigMap", names.job_config(observed.name)))
    return free if config in bare or observed.run_uid != observed.uid else bare


def follows_a_pod(child: Object) -> bool:
    """Return True if an object is deleted with a pod: Redis of a deleted job, which its trainer needs to its end."""
    return any(owner["kind"] == "Pod" for owner in child["metadata"].get("ownerReferences") or [])


def _is_free(child: Object) -> bool:
    if owner_uid(child) or is_leaving(child):
        return False
    return child["kind"] in _CHILDREN_KINDS and labels(child).get(names.MANAGED_BY) == names.FIELD_MANAGER


def adoption(observed: Observed, left: Sequence[Object]) -> list[Patch]:
    """Return the changes that make the job the owner of what an earlier one ``left``, as far as it is of its run."""
    owner = {"apiVersion": observed.job["apiVersion"], "kind": observed.job["kind"], "name": observed.name}
    owner |= {"uid": observed.uid, "controller": True, "blockOwnerDeletion": True}
    config = observed.children.get(("ConfigMap", names.job_config(observed.name)))
    inherited = recorded_run(config) if config is not None and owner_uid(config) != observed.uid else {}
    run = names.run_id(observed.name, inherited.get("uid", observed.run_uid))
    return [
        Patch(child["kind"], child["metadata"]["name"], {"metadata": _owned(child, owner)})
        for child in left
        if run_of_template(child) in ("", run)
    ]


def _owned(child: Object, owner: Manifest) -> Manifest:
    metadata = child["metadata"]
    expected = {key: metadata[key] for key in ("uid", "resourceVersion")}
    return {**expected, "ownerReferences": [*(metadata.get("ownerReferences") or []), owner]}


def run_of_template(child: Object) -> str:
    """Return the run whose pods an object makes; empty if it makes none."""
    template = (child.get("spec") or {}).get("template") or {}
    return str((template.get("metadata") or {}).get("labels", {}).get(names.LABEL_RUN, ""))


def hurry(pods: Iterable[Object]) -> list[Delete]:
    """Return the deletions that shorten the grace period of the trainers among the pods of deleted jobs."""
    return [
        Delete.of("Pod", pod, grace_s=_GRACE_S)
        for pod in pods
        if labels(pod).get(names.LABEL_ROLE) == "trainer" and _GRACE_S < _grace_s(pod) < math.inf
    ]


def lost_pods(observed: Observed, now: float) -> tuple[list[Delete], float | None]:
    """Return the forced deletions that are due, and the seconds until the next one."""
    forced = [role for role, facts in names.ROLES.items() if facts.grouped and role != "redis"]
    pods = [pod for role in forced for pod in observed.pods_of(role)]
    ends = [(pod, end) for pod in pods if (end := _forced_at(pod)) is not None]
    due = [Delete.of("Pod", pod, grace_s=0) for pod, end in ends if end <= now]
    return due, min((end - now for _, end in ends if end > now), default=None)


def _forced_at(pod: Object) -> float | None:
    # deletionTimestamp is the end of the grace period already.
    leaving = seconds(pod["metadata"].get("deletionTimestamp"))
    if leaving is None or not is_disrupted(pod):
        return None
    if (lost := lost_since(pod)) is not None:
        return min(leaving + _AFTER_GRACE_S, lost + _AFTER_LOSS_S)
    return leaving + _AFTER_GRACE_S


def scale_actions(
    observed: Observed, counts: Mapping[str, int | None], spec: Spec, rests: Callable[[str], bool]
) -> list[Action]:
    """Return corrections of the replica counts of existing Deployments, given those of a running job by name.

    A count of None is set by an autoscaler only; ``rests`` returns True if a Deployment is to have no pods now.
    """
    actions: list[Action] = []
    for name, count in counts.items():
        deployment = observed.child("Deployment", name)
        if deployment is None or is_leaving(deployment):
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


def suspend_job(job: Object, *, suspend: bool) -> Patch:
    """Return the patch that stops the pods of an attempt, or lets them start."""
    metadata = job["metadata"]
    return Patch("Job", metadata["name"], {"metadata": {"uid": metadata["uid"]}, "spec": {"suspend": suspend}})


def chooses_rollouts(observed: Observed, actions: Sequence[Action]) -> bool:
    """Return True if some, but not all, pods of a Deployment of rollouts are to leave."""
    return any(_candidates(observed, action) for action in actions)


def with_deletion_costs(observed: Observed, actions: Sequence[Action], busy: Mapping[str, int]) -> list[Action]:
    """Return the actions of a job's plan with the costs of the pods among which a ReplicaSet chooses.

    ``busy`` has the samples in flight by name of the rollout worker; without any, the ReplicaSet chooses by itself.
    """
    # A worker's name is its pod's, a process id and random digits.
    by_pod = {worker.rsplit("-", 2)[0]: count for worker, count in busy.items()}
    with_costs: list[Action] = []
    for action in actions:
        candidates = _candidates(observed, action)
        if isinstance(action, Scale) and by_pod.keys() & set(candidates):
            # A worker that sent no heartbeat yet has nothing in flight.
            action = replace(action, deletion_costs={pod: by_pod.get(pod, 0) for pod in candidates})
        with_costs.append(action)
    return with_costs


def _candidates(observed: Observed, action: Action) -> list[str]:
    """Return the pods of rollouts among which a ReplicaSet chooses; none if all of them leave, or none does."""
    if not isinstance(action, Scale) or action.replicas == 0:
        return []
    deployment = observed.child(action.kind, action.name)
    if deployment is None or labels(deployment).get(names.LABEL_ROLE) != "rollout":
        return []
    selected = deployment["spec"]["selector"]["matchLabels"].items()
    pods = [pod for pod in observed.pods_of("rollout") if selected <= labels(pod).items()]
    present = [str(pod["metadata"]["name"]) for pod in pods if not (is_leaving(pod) or is_over(pod))]
    return sorted(present) if len(present) > action.replicas else []
