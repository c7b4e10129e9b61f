"""Compute ``status`` of an RLJob or RewardService from what is observed: pure, and equal for equal observations.

``status.cost`` is the GPU time of a job by role, and what waiting for rewards cost. Time counts while a pod is bound to
a node. It is added up whenever the status changes for another reason, and from the number of GPUs that was last
reported: a job at rest is not written, and nothing is counted twice or lost over restarts of the operator. Readers add
``gpus`` × the time since ``countedTime``.

``rollouts`` and ``rolloutSelector`` are for the ``scale`` subresource of an RLJob, through which ``kubectl scale rlj``,
an HPA and KEDA read and change ``spec.rollout.replicas``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from plaudit_job.spec.pod import GPU
from plaudit_operator import names
from plaudit_operator.actions import EmitEvent
from plaudit_operator.admission import RefusedJob, lost_nulls
from plaudit_operator.attempts import group_of, replica_of
from plaudit_operator.children import transport
from plaudit_operator.children.context import JobContext
from plaudit_operator.children.pod import Child
from plaudit_operator.children.roles import ROLLOUT_ROLE, has_gateway
from plaudit_operator.names import NEEDED, ConditionType, Reason
from plaudit_operator.observed import (
    AWAITS_FINALIZER,
    NO_SUCH_KIND,
    OF_EARLIER_JOB,
    Object,
    Observed,
    gpu_seconds,
    holds,
    labels,
    owner_uid,
    timestamp,
)
from plaudit_operator.pod_state import held_by, is_leaving, is_over, is_scheduled
from plaudit_operator.policies import GangWait
from plaudit_operator.runtime.kinds import POD_GROUP, RLJOB
from plaudit_operator.status.conditions import Condition, degraded, healthy, merged, phase, summary
from plaudit_operator.status.roles import RoleState, lack_of, remedy_of

Status = dict[str, Any]
_Rest = Literal["", "suspended", "queue", "room"]
"""The reason why roles have no pods although nothing is wrong."""
_RESTS = {
    "suspended": (Reason.SUSPENDED_BY_USER, "suspended by spec.suspend"),
    "queue": (Reason.QUEUED, "waiting in the queue of scheduling.queueName"),
    "room": (Reason.WAITING_FOR_ROOM, "waiting until trainer, rollouts, reward models and Redis are scheduled"),
}
_NO_GANGS = (
    "scheduling.gang is native, but this cluster does not serve PodGroup of scheduling.k8s.io: nothing was started. "
    "Set gang: none in a new job, or have an administrator turn on the feature gates GenericWorkload and "
    "GangScheduling (docs/kubernetes/scheduling.md)"
)
_HAS_ENDED = "the job has ended"
_IS_DELETED = "it is being deleted: Kubernetes deletes its objects first"
_STAYS = "Its objects stay until then, and the operator repairs and replaces nothing"
_ROLE_OF = {
    ConditionType.TRANSPORT_READY: "transport",
    ConditionType.ROLLOUT_READY: "rollout",
    ConditionType.REWARD_READY: "reward",
    ConditionType.TRAINER_RUNNING: "trainer",
}
_RETRIES = "The operator repeats the call every few seconds"
_LOOK_AT_CLUSTER = (
    "If this stays, look at the API server and at the admission webhooks of the cluster: "
    "kubectl get validatingwebhookconfigurations,mutatingwebhookconfigurations"
)
_LOST = (
    "kubectl apply lost a null that was to remove a field: {}. Delete the object, and create it by kubectl apply "
    "--server-side"
)
_ANY_POD = "the role's pod"
_OF_ANY_POD = {"cpu", "memory", "ephemeral-storage"}
_EVENT_TYPES = {
    (ConditionType.SPEC_VALID, "True"): "Normal",
    (ConditionType.SPEC_VALID, "False"): "Warning",
    (ConditionType.ADMITTED, "True"): "Normal",
    (ConditionType.ADMITTED, "False"): "Warning",
    (ConditionType.TRAINER_RUNNING, "True"): "Normal",
    (ConditionType.DEGRADED, "True"): "Warning",
    (ConditionType.DEGRADED, "False"): "Normal",
    (ConditionType.SUSPENDED, "True"): "Normal",
    (ConditionType.ROLLED_OUT, "True"): "Normal",
    (ConditionType.ROLLED_OUT, "False"): "Normal",
    (ConditionType.COMPLETE, "True"): "Normal",
    (ConditionType.FAILED, "True"): "Warning",
}
_TROUBLES = {
    Reason.UNSCHEDULABLE,
    Reason.IMAGE_PULL,
    Reason.CONFIG_MISSING,
    Reason.OUT_OF_MEMORY,
    Reason.CRASHING,
    Reason.REFUSED_BY_CLUSTER,
}
"""Reasons of a role that is not ready for which a Warning event is emitted."""
_SILENT_AT_FIRST = {
    (ConditionType.SPEC_VALID, "True"),
    (ConditionType.DEGRADED, "False"),
    (ConditionType.ROLLED_OUT, "False"),
}


@dataclass(frozen=True)
class JobEnd:
    """Hold the end of a job, as a condition reports it."""

    condition: str
    reason: str
    message: str


def unadmitted_status(observed: Observed, reason: str, message: str, now: float) -> Status:
    """Return the status of a job whose objects cannot be made; the rest of it stays as it was."""
    return _finished(observed, {}, [Condition.of(ConditionType.ADMITTED, False, reason, message)], now)


def failing_status(observed: Observed, now: float) -> Status:
    """Return the status of a job of which a call failed before anything could be decided."""
    return _finished(observed, {}, [_admitted(observed)], now)


def cleanup_status(observed: Observed, now: float) -> Status:
    """Return the status of an ended job, which reports calls that fail while its objects are deleted."""
    if not (observed.refusals or observed.failures) and observed.condition(ConditionType.ADMITTED)["status"] == "True":
        return dict(observed.status)
    return _finished(observed, {}, [_admitted(observed)], now)


def refused_status(observed: Observed, refused: RefusedJob, now: float) -> Status:
    """Return the status of a job that cannot run as written; one that ran before has lost what it was admitted as."""
    objects = (
        "the objects that are left stay as they are" if observed.status.get("roles") else "no objects were created"
    )
    current = [
        Condition.of(ConditionType.SPEC_VALID, False, refused.reason, refused.message),
        Condition.of(ConditionType.ADMITTED, False, refused.reason, objects),
    ]
    return _finished(observed, {}, current, now)


def ended_status(observed: Observed, ending: JobEnd, now: float) -> Status:
    """Return the status at a job's end; ``merged`` keeps the conditions from before."""
    current = [
        Condition.of(ending.condition, True, ending.reason, ending.message),
        Condition.of(ConditionType.ADMITTED, True, Reason.ADMITTED, _HAS_ENDED),
        *_ended_roles(observed, ending),
        healthy(ending.reason, _HAS_ENDED),
    ]
    fields = _progress(observed) | {"completionTime": timestamp(now)} | _left_roles(observed, _kept_roles(observed))
    ended = _finished(observed, fields, current, now)
    return _with_cost(observed.status, ended, {}, now)


def _ended_roles(observed: Observed, ending: JobEnd) -> Iterator[Condition]:
    """Yield the conditions of the roles whose pods go with the job, as ``lifecycle.cleanup`` says."""
    kept = _kept_roles(observed)
    for kind, role in _ROLE_OF.items():
        if observed.condition(kind) and role not in kept:
            yield Condition.of(kind, False, ending.reason, ending.message)


def leaving_status(observed: Observed, now: float) -> Status:
    """Return the status of what is being deleted in the foreground: of its roles nothing may be relied on any more."""
    if observed.ended or not observed.status:
        return dict(observed.status)
    roles = [kind for kind in (*_ROLE_OF, ConditionType.ROLLED_OUT) if observed.condition(kind)]
    waits = [f"{kind} {name} {why}" for (kind, name), why in _held(observed).items()]
    message = ". ".join([_IS_DELETED, *waits])
    current = [Condition.of(kind, False, Reason.DELETING, message) for kind in roles]
    current.append(healthy(Reason.DELETING, message))
    if observed.condition(ConditionType.ADMITTED).get("status") == "True":
        current.append(Condition.of(ConditionType.ADMITTED, True, Reason.ADMITTED, message))
    left = _finished(observed, _left_roles(observed, set()), current, now)
    return _with_cost(observed.status, left, {}, now)


def _held(observed: Observed) -> dict[tuple[str, str], str]:
    """Return for which finalizers of others the object and its children wait that are being deleted."""
    own = {key: child for key, child in observed.children.items() if owner_uid(child) == observed.uid}
    items = {(observed.job["kind"], observed.name): observed.job} | own
    return {key: f"{AWAITS_FINALIZER} {held}" for key, item in sorted(items.items()) if (held := held_by(item))}


def _left_roles(observed: Observed, kept: Collection[str]) -> Status:
    """Return the fields with the pods of each role after the end, which leaves those of the ``kept`` ones."""
    gone = {"desired": 0, "ready": 0, "updated": 0}
    reports = observed.status.get("roles") or []
    counts = {name: count if name in kept else "0/0" for name, count in (observed.status.get("replicas") or {}).items()}
    left: Status = {"roles": [role if role["name"] in kept else {**role, **gone} for role in reports]}
    return left | ({"replicas": counts} if counts else {})


def _kept_roles(observed: Observed) -> set[str]:
    policy = (observed.job["spec"].get("lifecycle") or {}).get("cleanup", "All")
    if policy == "None":
        return {role["name"] for role in observed.status.get("roles") or []} - {"trainer"}
    return {"transport"} if policy == "KeepTransport" else set()


def status(
    context: JobContext,
    children: Sequence[Child],
    observed: Observed,
    roles: Mapping[str, RoleState],
    now: float,
    *,
    suspended: bool,
    waits: GangWait = "",
) -> Status:
    """Return the status of a job that runs or starts; ``waits`` is what all of it waits for."""
    rest: _Rest = "suspended" if suspended else waits
    admitted = _admitted(observed)
    reason, message = context.admitted.reason, context.admitted.message
    if lost := ", ".join(lost_nulls(observed.job)):
        message = f"{message}. {_LOST.format(lost)}"
    current = [
        Condition.of(ConditionType.SPEC_VALID, reason == Reason.VALID, reason, message),
        admitted,
        *_ready(context, roles, rest),
        _suspended(context, roles, rest),
    ]
    ready = all(condition.status == "True" for condition in current if condition.type in NEEDED)
    fields: Status = _progress(observed) | {
        "roles": [role.report() for role in roles.values()],
        "replicas": {name: roles[name].count for name in ("rollout", "reward") if name in roles},
    }
    if context.spec.trains:
        fields |= {"rollouts": _count_rollouts(observed), "rolloutSelector": _rollout_selector(context)}
    if has_gateway(context):
        fields["url"] = names.gateway_url(context.name, context.namespace)
    if ready and not rest:
        fields.setdefault("startTime", observed.status.get("startTime") or timestamp(now))
    started = "startTime" in {**observed.status, **fields}
    works = started and rest not in ("suspended", "queue")
    at_rest = _RESTS.get(rest) or (Reason.STARTING, "not all pods of the job have run yet")
    current.append(degraded(observed, roles, admitted, now) if works else healthy(*at_rest))
    if context.revision:
        fields["revision"] = context.revision
        current.append(_rolled_out(context, observed, roles, suspended=suspended))
    report = _finished(observed, fields, current, now)
    return _with_cost(observed.status, report, _held_gpus(context, children, observed), now)


def _finished(observed: Observed, fields: Status, current: list[Condition], now: float) -> Status:
    generation = int(observed.job["metadata"].get("generation", 1))
    conditions = merged(observed.status.get("conditions") or [], current, generation, now)
    conditions = merged(conditions, summary(conditions), generation, now)
    status_: Status = {
        **observed.status,
        **fields,
        "observedGeneration": generation,
        "run": observed.run,
        "conditions": conditions,
    }
    if observed.job["kind"] == RLJOB.kind:
        status_ = dict.fromkeys(("attempt", "restarts", "disruptions"), 0) | status_
    is_left = is_leaving(observed.job) and not holds({"status": status_}, ConditionType.COMPLETE, ConditionType.FAILED)
    return status_ | {"phase": Reason.DELETING if is_left else phase(conditions, started="startTime" in status_)}


def _progress(observed: Observed) -> Status:
    return {"progress": {**observed.status.get("progress", {}), **observed.progress}} if observed.progress else {}


def _admitted(observed: Observed) -> Condition:
    held = {} if observed.ended else _held(observed)
    if waits := held.get((observed.job["kind"], observed.name)):
        message = f"it is being deleted and {waits}: whoever set it has to take it off. {_STAYS}"
        return Condition.of(ConditionType.ADMITTED, False, Reason.DELETING, message)
    problems = {**held, **observed.failures, **observed.refusals}
    if not problems:
        told = _HAS_ENDED if observed.ended else "all objects of the job exist"
        return Condition.of(ConditionType.ADMITTED, True, Reason.ADMITTED, told)
    message = "; ".join(f"{kind} {name}: {why}" for (kind, name), why in sorted(problems.items()))
    remedy = ". ".join(dict.fromkeys(filter(None, (remedy_of(problems[key], _ANY_POD) for key in sorted(problems)))))
    if not observed.refusals:
        if all(OF_EARLIER_JOB in why or why == held.get(key) for key, why in problems.items()):
            told = f"{message}. {remedy}" if remedy else message
            return Condition.of(ConditionType.ADMITTED, False, Reason.AWAITING_DELETION, told)
        return Condition.of(
            ConditionType.ADMITTED, False, Reason.CALL_FAILED, f"{message}. {_RETRIES}. {remedy or _LOOK_AT_CLUSTER}"
        )
    reason = Reason.REFUSED_BY_CLUSTER
    if any("is not this job's" in why for why in observed.refusals.values()):
        reason = Reason.NAME_TAKEN
    elif any(kind == POD_GROUP.kind and NO_SUCH_KIND in why for (kind, _), why in observed.refusals.items()):
        reason, message = Reason.GANG_UNAVAILABLE, _NO_GANGS
    return Condition.of(ConditionType.ADMITTED, False, reason, f"{message}. {remedy}" if remedy else message)


def _ready(context: JobContext, roles: Mapping[str, RoleState], rest: _Rest) -> Iterator[Condition]:
    """Yield the conditions of the roles; of roles that are scheduled together the scheduler reports what is missing."""
    together: _Rest = "" if rest == "room" else rest
    if transport.managed(context):
        redis: _Rest = together if context.spec.scheduling.whole else ""
        yield _role(ConditionType.TRANSPORT_READY, [roles["transport"]], redis)
    else:
        message = f"external Redis at {context.redis_url}"
        yield Condition.of(ConditionType.TRANSPORT_READY, True, Reason.EXTERNAL, message)
    if context.spec.trains:
        yield _role(ConditionType.ROLLOUT_READY, [roles["rollout"]], together)
    needed = ("reward", "gateway", "model", "environment")
    scoring = [role for name, role in roles.items() if name.partition("/")[0] in needed]
    yield _role(ConditionType.REWARD_READY, scoring, rest)
    if context.spec.trains:
        yield _role(ConditionType.TRAINER_RUNNING, [roles["trainer"]], together, ready=Reason.RUNNING)


def _role(kind: str, roles: list[RoleState], rest: _Rest, *, ready: str = Reason.READY) -> Condition:
    if rest:
        return Condition.of(kind, False, *_RESTS[rest])
    missing = [role for role in roles if not role.is_ready]
    if not missing:
        return Condition.of(kind, True, ready, ", ".join(f"{role.name} {role.count}" for role in roles))
    return Condition.of(kind, False, *lack_of(missing))


def _suspended(context: JobContext, roles: Mapping[str, RoleState], rest: _Rest) -> Condition:
    if rest == "queue":
        exists = f"kubectl get localqueues --namespace {context.namespace} has to list it"
        look = f"{exists}, and kubectl describe workloads.kueue.x-k8s.io {context.run} shows the job's position"
        message = f"waiting in queue {context.spec.scheduling.queue_name!r}; {look}"
        return Condition.of(ConditionType.SUSPENDED, True, Reason.QUEUED, message)
    if rest != "suspended":
        return Condition.of(ConditionType.SUSPENDED, False, Reason.NOT_SUSPENDED, "")
    stays = {"transport": roles["transport"].desired} if "transport" in roles else {}
    left = [role for role in roles.values() if role.name != "metrics" and role.held > stays.get(role.name, 0)]
    if left:
        message = f"waiting for pods to end: {', '.join(f'{role.name} {role.held}' for role in left)}"
        return Condition.of(ConditionType.SUSPENDED, False, Reason.SUSPENDING, message)
    kept = "its volumes are kept" if context.spec.scheduling.whole else "Redis and volumes are kept"
    message = f"suspended; {kept}. Resume it with kubectl plaudit resume {context.name}"
    return Condition.of(ConditionType.SUSPENDED, True, Reason.SUSPENDED_BY_USER, message)


def _held_gpus(context: JobContext, children: Sequence[Child], observed: Observed) -> dict[str, int]:
    """Return the GPUs that each role holds now; roles whose pods ask for none are left out."""
    held, templates = {}, context.admitted.templates
    for child in children:
        if limits := _limits(templates.get(child.name) or {}):
            resource = child.process(context).pod.gpu_resource or context.platform.gpu_resource
            if each := sum(int(given.get(resource) or given.get(GPU) or 0) for given in limits):
                pods = _pods(observed, child)
                held[child.name] = each * sum(is_scheduled(pod) and not is_over(pod) for pod in pods)
    return held


def _limits(frozen: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the limits of a template's containers that limit more than what every pod may."""
    containers = (frozen.get("template") or {}).get("spec", {}).get("containers") or []
    limits = (container.get("resources", {}).get("limits") or {} for container in containers)
    return [each for each in limits if each.keys() - _OF_ANY_POD]


def _pods(observed: Observed, child: Child) -> list[Object]:
    """Return the pods of a child, of a scorer those of all generations of its model."""
    own = {name: value for name, value in child.labels.items() if name != names.LABEL_MODEL}
    return [pod for pod in observed.pods_of(child.role) if own.items() <= labels(pod).items()]


def _with_cost(before: Object, report: Status, held: Mapping[str, int], now: float) -> Status:
    """Return a status with its cost, given the one last reported and the GPUs held by role."""
    cost = before.get("cost") or {}
    gpus = {role["name"]: int(role["gpus"]) for role in cost.get("roles") or []}
    wanted = {**dict.fromkeys(gpus, 0), **held}
    unchanged = all(before.get(name) == value for name, value in report.items() if name != "cost")
    if not wanted or (unchanged and gpus == wanted):
        return report
    spent = gpu_seconds(cost, now)
    roles = [{"name": name, "gpus": wanted[name], "gpuSeconds": spent.get(name, 0)} for name in sorted(wanted)]
    waited = int(cost.get("exposedRewardGpuSeconds", 0)) + _exposed_gpu_s(before, report, gpus.get("trainer", 0))
    return {**report, "cost": {"roles": roles, "exposedRewardGpuSeconds": waited, "countedTime": timestamp(now)}}


def _exposed_gpu_s(before: Mapping[str, Any], report: Mapping[str, Any], trainer_gpus: int) -> int:
    """Return the GPU seconds that the trainer waited for rewards in the steps closed since the last report.

    The metrics service reports the wait of the last step; steps that closed since the last report count alike.
    """
    progress = report.get("progress") or {}
    steps = int(progress.get("step") or 0) - int((before.get("progress") or {}).get("step") or 0)
    return max(0, round(steps * float(progress.get("exposedRewardSeconds") or 0.0) * trainer_gpus))


def _rolled_out(
    context: JobContext, observed: Observed, roles: Mapping[str, RoleState], *, suspended: bool
) -> Condition:
    """Return the condition ``RolledOut``: all reward workers and gateways of a service are of its present revision.

    It becomes true once they are ready, and stays so when one of them fails later.
    """
    before = observed.condition(ConditionType.ROLLED_OUT).get("status")
    served = before == "True" and observed.status.get("revision") == context.revision
    if suspended and not served:
        return Condition.of(ConditionType.ROLLED_OUT, False, *_RESTS["suspended"])
    deployments = {role: observed.child("Deployment", context.role_object(role)) for role in names.REVISED_ROLES}
    deployments = {role: found for role, found in deployments.items() if role in roles}
    behind = {
        role: found
        for role, found in deployments.items()
        if not _is_current(found, context.revision) or not (served or roles[role].is_ready)
    }
    if not behind:
        message = f"all pods are of revision {context.revision}"
        return Condition.of(ConditionType.ROLLED_OUT, True, Reason.ROLLED_OUT, message)
    stuck = any(_is_stuck(found) for found in behind.values())
    reason = Reason.ROLL_OUT_STUCK if stuck else Reason.ROLLING_OUT
    parts = [_part(role, found, roles, context.revision) for role, found in behind.items()]
    return Condition.of(ConditionType.ROLLED_OUT, False, reason, "; ".join(parts))


def _is_current(deployment: Object | None, revision: str) -> bool:
    if deployment is None or _revision(deployment) != revision:
        return False
    metadata, status = deployment["metadata"], deployment.get("status") or {}
    if int(status.get("observedGeneration", 0)) < int(metadata.get("generation", 0)):
        return False
    desired = int(deployment["spec"].get("replicas", 1))
    return int(status.get("updatedReplicas", 0)) >= desired and int(status.get("replicas", 0)) <= desired


def _revision(deployment: Object) -> str:
    return labels(deployment["spec"]["template"]).get(names.LABEL_REVISION, "")


def _is_stuck(deployment: Object | None) -> bool:
    conditions = ((deployment or {}).get("status") or {}).get("conditions") or []
    return any(condition.get("reason") == "ProgressDeadlineExceeded" for condition in conditions)


def _part(role: str, deployment: Object | None, roles: Mapping[str, RoleState], revision: str) -> str:
    status = (deployment or {}).get("status") or {}
    updated = int(status.get("updatedReplicas", 0)) if deployment and _revision(deployment) == revision else 0
    state = roles[role]
    parts = [
        f"{role}: {updated} of {state.desired} pods are of revision {revision}, {state.ready} are ready",
        state.problem,
        state.remedy,
    ]
    return ". ".join(part for part in parts if part)


def _count_rollouts(observed: Observed) -> int:
    """Return the number of rollout workers whose pods exist; the pods of a replica count as one."""
    pods = [pod for pod in observed.pods_of(ROLLOUT_ROLE) if not (is_over(pod) or is_leaving(pod))]
    single = [pod for pod in pods if replica_of(pod) < 0]
    return len(single) + len({(group_of(pod), replica_of(pod)) for pod in pods if replica_of(pod) >= 0})


def _rollout_selector(context: JobContext) -> str:
    """Return the labels of one pod of each rollout worker of a job without groups."""
    labels = context.labels(ROLLOUT_ROLE)
    if context.spec.rollout.pods_per_replica > 1:
        labels |= {names.COMPLETION_INDEX: "0"}
    return ",".join(f"{key}={value}" for key, value in labels.items())


def transitions(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[EmitEvent]:
    """Yield the events to emit: changed conditions, new problems, attempts that ended."""
    known = {c["type"]: (c["status"], c["reason"]) for c in before.get("conditions") or []}
    emitted: set[str] = set()
    for condition in after.get("conditions") or []:
        kind, status_, reason = condition["type"], condition["status"], condition["reason"]
        was, why = known.get(kind, ("", ""))
        event = _EVENT_TYPES.get((kind, status_)) if was != status_ else None
        if kind in NEEDED and status_ == "False" and reason in _TROUBLES and reason != why:
            event = "Warning"
        silent = kind not in known and (kind, status_) in _SILENT_AT_FIRST
        if event is None or silent or (kind == ConditionType.DEGRADED and reason in emitted):
            continue
        emitted.add(reason)
        yield EmitEvent(event, reason, condition["message"] or f"{kind} is {status_}")
    roles: Sequence[Mapping[str, Any]] = after.get("roles") or ()
    last_failure = next((str(role.get("lastFailure", "")) for role in roles if role["name"] == "trainer"), "")
    for counter, reason in (("restarts", Reason.ATTEMPT_FAILED), ("disruptions", Reason.DISRUPTED)):
        if int(after.get(counter, 0)) > int(before.get(counter, 0)):
            yield EmitEvent("Warning", reason, last_failure)
