"""Decide on a job as a whole: its deadlines, when it may start, who manages it, what outlives a revision, when it goes.

**Deadlines**: a job that does not start in time fails and frees its resources; one that runs too long ends.

**All or nothing** (``scheduling.gang``, ``scheduling.queueName``): a job counts as scheduled while a pod of its trainer
or rollouts is bound to a node, since the scheduler, or Kueue, binds all of them together. Until then the roles outside
the group have no pods, so that two jobs never take each other's last GPU. A suspended or preempted job frees all
resources of its group, Redis's too, and has to be scheduled again.

**Refused pods**, for a quota or an admission policy: a Deployment reports them in its condition ``ReplicaFailure``.
Jobs and StatefulSets only emit events, which the operator does not watch: ``planning/reconcile.py`` lists the events of
objects that lack pods.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from plaudit_job.spec.rljob import LifecycleSpec
from plaudit_operator import names
from plaudit_operator.admission import frozen_changes, unreadable
from plaudit_operator.names import CONTROLLER, ConditionType, Reason
from plaudit_operator.observed import (
    Object,
    Observed,
    delete_command,
    holds,
    labels,
    owner_uid,
    recorded_run,
    seconds,
)
from plaudit_operator.pod_state import held_by, is_gated, is_leaving, is_over, is_scheduled
from plaudit_operator.runtime.kinds import RLJOB
from plaudit_operator.services import changed_sections

GangWait = Literal["", "room", "queue"]
"""The reason to wait: none (empty), room for the whole group, or the queue."""
REASON_OF_EVENTS = "FailedCreate"
FIRST_LOOK_AFTER_S = 5.0
_NAMED = 3
"""Objects that a message names before the command that names all."""
_PODS_WITHIN_S = 3.0
"""Time from the creation of an object until its pods usually exist."""


@dataclass(frozen=True)
class Deadline:
    """Hold the deadline that comes next."""

    reason: str
    message: str
    left_s: float


def next_deadline(observed: Observed, lifecycle: LifecycleSpec, now: float, *, suspended: bool) -> Deadline | None:
    """Return the deadline that applies now; None if there is none. It has passed if ``left_s`` is 0 or less.

    Suspension and waiting in a queue do not count: both clocks restart when a job is resumed or admitted.
    """
    if suspended:
        return None
    resumed = _resumed(observed, now)
    started = seconds(observed.status.get("startTime"))
    if started is None:
        limit = lifecycle.pre_running_deadline_seconds
        message = f"not all pods ran within {limit} s (lifecycle.preRunningDeadlineSeconds): {_missing(observed)}"
        return Deadline(Reason.PRE_RUNNING_DEADLINE, message, resumed + limit - now)
    if lifecycle.active_deadline_seconds is None:
        return None
    limit = lifecycle.active_deadline_seconds
    message = f"the job ran longer than {limit} s (lifecycle.activeDeadlineSeconds)"
    return Deadline(Reason.ACTIVE_DEADLINE, message, max(started, resumed) + limit - now)


def _resumed(observed: Observed, now: float) -> float:
    """Return when the last suspension ended, or the job was first seen to be valid; now if that is not reported yet.

    All by the operator's clock: that of the API server, which dates a creation, may be another.
    """
    condition = observed.condition(ConditionType.SUSPENDED)
    if condition.get("status") == "True":
        return now
    return seconds(condition.get("lastTransitionTime")) or now


def _missing(observed: Observed) -> str:
    """Return the last messages of the roles that were not ready."""
    conditions = [observed.condition(type_) for type_ in (ConditionType.ADMITTED, *names.NEEDED)]
    missing = [f"{c['type']}: {c['message']}" for c in conditions if c.get("status") == "False" and c.get("message")]
    return "; ".join(missing) or "some pods were not ready"


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


def is_managed_elsewhere(observed: Observed) -> bool:
    """Return True if ``spec.managedBy`` (immutable) gives the job to another controller, such as MultiKueue's."""
    return observed.job["spec"].get("managedBy", "") not in ("", CONTROLLER)


def runs_on(observed: Observed) -> bool:
    """Return True if a job is being deleted and its objects stay: Kubernetes deletes them after it, and it waits.

    In the foreground they go before it.
    """
    is_first = "foregroundDeletion" in (observed.job["metadata"].get("finalizers") or ())
    owned = (owner_uid(child) == observed.uid for child in observed.children.values())
    return bool(held_by(observed.job)) and not is_first and any(owned)


def inherited_problem(observed: Observed, left: Sequence[Object]) -> str:
    """Return why the job cannot adopt what an earlier one of its name ``left``; empty if it can, or need not.

    It needs the ConfigMap that says of which run the objects are, and from which spec they were made.
    """
    config = observed.children.get(("ConfigMap", names.job_config(observed.name)))
    if config is not None and owner_uid(config) == observed.uid:
        return ""
    changed: list[str] | None = None
    readable = config is not None and config in left and not unreadable(config.get("data") or {})
    if config is not None and readable and recorded_run(config).get("kind") == observed.job["kind"]:
        changed = _changed_since(observed.job, config)
        if not changed:
            return ""
    objects = [(child["kind"], child["metadata"]["name"]) for child in left]
    differs = f"whose spec was another ({', '.join(changed)})" if changed else "whose spec is not known"
    named = ", ".join(f"{kind} {name}" for kind, name in objects[:_NAMED])
    more = f" and {len(objects) - _NAMED} more" if len(objects) > _NAMED else ""
    problem = f"{named}{more} are left from an earlier job of this name, {differs}, and its processes may still run"
    return f"{problem}. Rename the job, or delete them: {delete_command(observed.namespace, objects)}"


def _changed_since(job_object: Object, config: Object) -> list[str]:
    """Return the fields of a job that differ from those that its inherited ConfigMap was written from."""
    data = config["data"]
    if job_object["kind"] == RLJOB.kind:
        return frozen_changes(json.loads(data["spec.json"]), job_object["spec"])
    return changed_sections(job_object["spec"], json.loads(data["current.json"]))


def is_in_use(observed: Observed, child: Object, revision: str) -> bool:
    """Return True if pods of another revision may use a child that the present ``revision`` does not have.

    The last of them takes it along. An RLJob has one revision only, whose name is empty.
    """
    of_a_revision = names.LABEL_REVISION in labels(child) or names.LABEL_MODEL in labels(child)
    if not revision or not of_a_revision:
        return False
    return any(labels(pod).get(names.LABEL_REVISION, revision) != revision for pod in observed.pods)


def lacking(observed: Observed) -> list[Object]:
    """Return the Jobs and StatefulSets that want more pods than exist."""
    present = Counter(map(owner_uid, observed.pods))
    owners = [*observed.own("Job"), *observed.own("StatefulSet")]
    return [owner for owner in owners if _wanted(owner) > present[owner["metadata"]["uid"]]]


def _wanted(owner: Object) -> int:
    spec = owner["spec"]
    if owner["metadata"].get("deletionTimestamp"):
        return 0
    if owner["kind"] == "StatefulSet":
        return int(spec.get("replicas", 1))
    return 0 if holds(owner, "Complete", "Failed") or spec.get("suspend") else int(spec["parallelism"])


def is_overdue(owner: Object, now: float) -> bool:
    """Return True if an object is old enough that its pods should exist."""
    return now - (seconds(owner["metadata"].get("creationTimestamp")) or now) >= _PODS_WITHIN_S


def refusal_of(events: Iterable[Object]) -> str:
    """Return the newest refusal among events of one object; empty if there is none."""
    newest = max(events, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""), default={})
    return without_pod_name(str(newest.get("message", "")))


def without_pod_name(message: str) -> str:
    """Return the cause in an API server's refusal of a pod, without the pod's random name."""
    return re.split("is (?:forbidden|invalid): ", message, maxsplit=1)[-1]


def time_left_s(observed: Observed, now: float) -> float | None:
    """Return the seconds until an ended job is deleted (``lifecycle.ttlSecondsAfterFinished``); None for never."""
    ttl = (observed.job["spec"].get("lifecycle") or {}).get("ttlSecondsAfterFinished")
    ended = seconds(observed.status.get("completionTime"))
    return None if ttl is None or ended is None else ended + float(ttl) - now
