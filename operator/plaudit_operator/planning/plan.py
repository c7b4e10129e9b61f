"""Plan the next actions for a job: a pure function of the observed objects and the time.

Equal observations give equal plans, and a cluster that already is as planned gives an empty one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from plaudit_job.spec.pod import quantity
from plaudit_operator import attempts
from plaudit_operator.actions import (
    Action,
    Apply,
    Create,
    Delete,
    Patch,
    Plan,
    adoption,
    cleanup_actions,
    earliest,
    left_behind,
    lost_pods,
    outliving_trainer,
    scale_actions,
    suspend_job,
)
from plaudit_operator.admission import RefusedJob, digest
from plaudit_operator.attempts import TrainerAttempt, decide_replicas, exhausted, never_ran, present_attempt
from plaudit_operator.children.context import JobContext, Manifest
from plaudit_operator.children.pod import Child
from plaudit_operator.children.roles import ROLLOUT_ROLE, TRAINER_ROLE, rollout_job, trainer_job
from plaudit_operator.names import ConditionType, Reason
from plaudit_operator.observed import Object, Observed, attempt_of, owner_uid
from plaudit_operator.planning.rendering import Rendering, rendering
from plaudit_operator.pod_state import is_leaving, late_at
from plaudit_operator.policies import (
    Deadline,
    inherited_problem,
    is_in_use,
    is_managed_elsewhere,
    next_deadline,
    runs_on,
    time_left_s,
)
from plaudit_operator.runtime.kinds import CHILDREN, JOB
from plaudit_operator.settings import OperatorSettings
from plaudit_operator.status.roles import RoleState, role_states
from plaudit_operator.status.status import (
    JobEnd,
    cleanup_status,
    ended_status,
    failing_status,
    leaving_status,
    refused_status,
    status,
    unadmitted_status,
)

PROGRESS_EVERY_S = 10.0
_LOOK_AGAIN_S = 8.0
_LACKS_OTHERS = (Reason.FILES_MISSING, Reason.FILES_INVALID, Reason.SERVICE_MISSING)
"""Reasons that pass when another object is created or changed, which the operator does not watch for this job."""
_AFTER_A_COUNT_S = 1.0
"""The watch usually reports the written status sooner."""
_GRACE_OF_A_BROKEN_RANK_S = 10
"""Ranks of a broken group hang in a collective and have nothing to save."""
_QUANTITY_MAPS = ("requests", "limits", "hard")
_FIXED = {"StatefulSet": ("volumeClaimTemplates",)}
"""Fields that a policy may have changed when the object was made, and that nobody can change any more."""
_EMPTY: tuple[Any, ...] = (None, "", [], {}, 0, False)
_KEYS = ("name", "containerPort", "mountPath", "uid", "key")
"""Keys that identify items of a list; the first one that all items have, each its own, applies."""


def plan(observed: Observed, settings: OperatorSettings, now: float) -> Plan:
    """Return the plan for a job; ``now`` is in seconds since the epoch."""
    if is_managed_elsewhere(observed):
        return Plan(dict(observed.status))
    leaves = is_leaving(observed.job)
    if leaves and not runs_on(observed):  # garbage collection deletes the children
        return Plan(leaving_status(observed, now))
    if observed.ended:
        return _after_the_end(observed, now)
    if not leaves and (inheriting := _inheriting(observed, now)):
        return inheriting
    rendered = rendering(observed, settings)
    if isinstance(rendered, RefusedJob):
        wait = _LOOK_AGAIN_S if rendered.reason in _LACKS_OTHERS else None
        return Plan(refused_status(observed, rendered, now), requeue_after_s=wait)
    planned = _alive(rendered, observed, now)
    return replace(planned, actions=[]) if leaves else planned


def _inheriting(observed: Observed, now: float) -> Plan | None:
    """Return the plan of a job that finds objects of an earlier one of its name; None if it need not look at them."""
    left = left_behind(observed)
    if not left:
        return None
    if problem := inherited_problem(observed, left):
        return Plan(unadmitted_status(observed, Reason.NAME_TAKEN, problem, now), requeue_after_s=_LOOK_AGAIN_S)
    adopted = adoption(observed, left)
    if adopted and (observed.failures or observed.refusals):
        return Plan(failing_status(observed, now))
    return Plan(dict(observed.status), list(adopted), _AFTER_A_COUNT_S) if adopted else None


def _after_the_end(observed: Observed, now: float) -> Plan:
    """Return the plan of an ended job: it creates nothing."""
    left, actions = time_left_s(observed, now), cleanup_actions(observed)
    if left is not None and left <= 0:
        actions.append(Delete.of(observed.job["kind"], observed.job))
    return Plan(cleanup_status(observed, now), actions, left if left and left > 0 else None)


def _alive(rendered: Rendering, observed: Observed, now: float) -> Plan:
    context, suspended = rendered.context, rendered.suspended
    spec = context.spec
    attempt = present_attempt(observed, spec.lifecycle.failure_policy.rules) if spec.trains else None
    rests = suspended or rendered.waits == "queue" or bool(context.revision)  # a service never ends
    deadline = next_deadline(observed, spec.lifecycle, now, suspended=rests)
    if ending := _ending(context, observed, attempt, deadline):
        return Plan(ended_status(observed, ending, now), requeue_after_s=_AFTER_A_COUNT_S)
    if attempt and attempt.verdict in ("failed", "disrupted"):
        return _next_attempt(rendered, observed, attempt, now)
    roles = role_states(context, rendered.children, observed, attempt, now, rendered.created_with)
    lost, next_lost = lost_pods(observed, now)
    replicas, next_replica = _replicas(rendered, observed, now)
    actions = [*_children(rendered, observed), *lost, *replicas, *attempts.restored_sizes(observed)]
    pause_s = 0.0
    if attempt:
        pause_s = attempts.left_s(observed, now) if attempt.verdict == "absent" else 0.0
        actions += _trainer_actions(rendered, observed, attempt, pauses=pause_s > 0)
        if pause_s > 0 and not suspended:
            roles["trainer"] = _backing_off(roles["trainer"], observed)
    report = status(context, rendered.children, observed, roles, now, suspended=suspended, waits=rendered.waits)
    wait = earliest(
        next_lost,
        next_replica,
        deadline.left_s if deadline else None,
        pause_s or None,
        observed.look_for_refusals_after_s,
        min((late - now for pod in observed.pods if (late := late_at(pod)) is not None and late > now), default=None),
        _LOOK_AGAIN_S if context.admitted.reason in _LACKS_OTHERS else None,
        PROGRESS_EVERY_S if report["phase"] in ("Running", "Degraded") else None,
    )
    return Plan(report, actions, wait)


def _ending(
    context: JobContext, observed: Observed, attempt: TrainerAttempt | None, deadline: Deadline | None
) -> JobEnd | None:
    if deadline and deadline.left_s <= 0:
        return JobEnd(ConditionType.FAILED, deadline.reason, deadline.message)
    if attempt is None:
        return None
    if attempt.verdict == "done":
        return JobEnd(ConditionType.COMPLETE, attempt.reason, attempt.message)
    if attempt.verdict == "final":
        return JobEnd(ConditionType.FAILED, attempt.reason, attempt.message)
    over = exhausted(observed, attempt, context.spec.lifecycle.failure_policy)
    return JobEnd(ConditionType.FAILED, *over) if over else None


def _next_attempt(rendered: Rendering, observed: Observed, attempt: TrainerAttempt, now: float) -> Plan:
    """Count an attempt that ended. The next attempt starts once the count is written."""
    context = rendered.context
    counter = "restarts" if attempt.verdict == "failed" else "disruptions"
    counted = {**observed.status, counter: int(observed.status.get(counter, 0)) + 1, "attempt": attempt.number + 1}
    policy = context.spec.lifecycle.failure_policy.backoff
    counted |= attempts.after_attempt(observed, attempt, policy, now)
    after = replace(observed, job={**observed.job, "status": counted})
    next_attempt = TrainerAttempt(attempt.number + 1, "absent")
    roles = role_states(context, rendered.children, after, next_attempt, now, rendered.created_with)
    roles["trainer"] = replace(roles["trainer"], reason=attempt.reason, problem=attempt.message)
    suspended, waits = rendered.suspended, rendered.waits
    report = status(context, rendered.children, after, roles, now, suspended=suspended, waits=waits)
    return Plan(report, requeue_after_s=_AFTER_A_COUNT_S)


def _children(rendered: Rendering, observed: Observed) -> Iterator[Action]:
    context = rendered.context
    for child in rendered.children:
        if _lacks(observed, rendered, child):
            yield from (Create(manifest, first=True) for manifest in child.created_once(context))
    for manifest in rendered.manifests:
        yield from _child(rendered, observed, outliving_trainer(manifest, observed))
    yield from _obsolete(observed, rendered.manifests, context.revision)
    yield from scale_actions(observed, rendered.replicas, context.spec, rendered.rests)


def _lacks(observed: Observed, rendered: Rendering, child: Child) -> bool:
    """Return True if the owner of its pods is wanted and missing: what only these need may be missing too."""
    owner = child.kind.kind, child.owner
    wanted = (owner == (each["kind"], each["metadata"]["name"]) for each in rendered.manifests)
    return not observed.child(*owner) and any(wanted)


def _child(rendered: Rendering, observed: Observed, manifest: Manifest) -> Iterator[Action]:
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    present = observed.children.get((kind, name))
    first = kind in ("ConfigMap", "ServiceAccount", "PodGroup")
    if present is None or owner_uid(present) != observed.uid:
        yield Create(manifest, rendered.created_with(name) if kind == "Deployment" else None, first)
    elif not is_leaving(present) and differs(manifest := _repairable(manifest, present), present):
        metadata = {**manifest["metadata"], "uid": present["metadata"]["uid"]}
        yield Apply({**manifest, "metadata": metadata}, first)


def _repairable(manifest: Manifest, present: Object) -> Manifest:
    """Return a manifest with what an update cannot change as it is, and without a pause (``kubectl rollout pause``)."""
    spec = present.get("spec") or {}
    given = {name: spec[name] for name in _FIXED.get(manifest["kind"], ()) if name in spec}
    given |= {"paused": False} if spec.get("paused") else {}
    return {**manifest, "spec": {**manifest["spec"], **given}} if given else manifest


def _obsolete(observed: Observed, manifests: Sequence[Manifest], revision: str) -> Iterator[Delete]:
    """Delete children that the spec no longer requires: an autoscaler, a disruption budget."""
    wanted = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests}
    for kind in CHILDREN:
        if kind.kind == "Job":
            continue
        for child in observed.own(kind.kind):
            kept = (kind.kind, child["metadata"]["name"]) in wanted or is_leaving(child)
            if not kept and not is_in_use(observed, child, revision):
                yield Delete.of(kind.kind, child)


def _replicas(rendered: Rendering, observed: Observed, now: float) -> tuple[list[Action], float | None]:
    """Return the changes of rollout replicas of several pods, and the seconds until the next pause is over."""
    context, actions, waits = rendered.context, list[Action](), list[float | None]()
    policy = context.spec.lifecycle.failure_policy.backoff
    for child in rendered.children:
        if child.role != ROLLOUT_ROLE or child.kind is not JOB:
            continue
        count = 0 if rendered.suspended else child.replicas or 0
        template = rendered.templates[child.name]["template"]
        decision = decide_replicas(observed, child.part, digest(template), count, policy, now)
        for attempt in decision.starts:
            # The number of an attempt is kept by its Job: the next one is made before the one before is deleted.
            made = rollout_job(child, template, attempt, suspend=attempt.number > 0)
            actions.append(Create(made, first=True))
        actions += decision.changes
        waits.append(decision.wait_s)
    return actions, earliest(*waits)


def _backing_off(trainer_role: RoleState, observed: Observed) -> RoleState:
    next_time, count = observed.status["nextAttemptTime"], observed.status["shortAttempts"]
    pause = f"The next attempt starts at {next_time}: {count} in a row ended early"
    return replace(trainer_role, reason=Reason.BACK_OFF, remedy=pause)


def _trainer_actions(
    rendered: Rendering, observed: Observed, attempt: TrainerAttempt, *, pauses: bool
) -> Iterator[Action]:
    """Delete earlier attempts with all their pods; once they are gone, and the back-off is over, start this one."""
    earlier = [job for job in observed.jobs_of("trainer") if attempt_of(job) < attempt.number]
    for job in earlier:
        if not is_leaving(job):
            yield Delete.of("Job", job)
    pods = observed.pods_of("trainer")
    for pod in pods:
        if attempt_of(pod) < attempt.number and not is_leaving(pod):
            yield Delete.of("Pod", pod, grace_s=_GRACE_OF_A_BROKEN_RANK_S)
    child = next(each for each in rendered.children if each.role == TRAINER_ROLE)
    template = rendered.templates[child.name]["template"]
    if attempt.job is None:
        yield from attempts.deletions_of_orphans(pods)
        if any(owner_uid(pod) and attempt_of(pod) == attempt.number and not is_leaving(pod) for pod in pods):
            # Their Job is there, and has lost the labels by which it would be seen; or garbage collection comes next.
            unseen = trainer_job(child, template, attempt.number, suspend=False)["metadata"]
            yield Patch("Job", unseen["name"], {"metadata": {"labels": unseen["labels"]}}, is_there=False)
    if attempt.job is not None and never_ran(attempt.job, pods, digest(template)):
        yield Delete.of("Job", attempt.job)
    elif attempt.verdict == "absent" and not (earlier or pods or rendered.suspended or pauses):
        yield Create(trainer_job(child, template, attempt.number, suspend=False))
    if attempt.job is not None and bool(attempt.job["spec"].get("suspend")) != rendered.suspended:
        yield suspend_job(attempt.job, suspend=rendered.suspended)


def differs(wanted: Any, observed: Any, field: str = "") -> bool:
    """Return True if an object has drifted: ``observed`` lacks a part of ``wanted``, which are values of ``field``.

    Fields that the API server adds (defaults, status) do not count. Quantities and empty values in another notation are
    equal.
    """
    if wanted == observed:
        return False
    if isinstance(wanted, dict):
        if observed is None:
            return any(value not in _EMPTY for value in wanted.values())
        if not isinstance(observed, dict):
            return True
        return any(_value_differs(key, value, observed.get(key), field) for key, value in wanted.items())
    if isinstance(wanted, list):
        return _list_differs(wanted, observed or [], field)
    return not (wanted in _EMPTY and observed in _EMPTY)


def _value_differs(key: str, wanted: Any, observed: Any, parent: str) -> bool:
    if (parent in _QUANTITY_MAPS or key == "sizeLimit") and observed is not None:
        return bool(_amount(wanted) != _amount(observed))
    return differs(wanted, observed, key)


def _list_differs(wanted: list[Any], observed: Any, field: str) -> bool:
    if not isinstance(observed, list):
        return True
    key = _key(wanted)
    if key is None:
        return len(wanted) != len(observed) or any(differs(a, b, field) for a, b in zip(wanted, observed, strict=True))
    by_key = {item.get(key): item for item in observed if isinstance(item, dict)}
    return any(item[key] not in by_key or differs(item, by_key[item[key]], field) for item in wanted)


def _key(items: list[Any]) -> str | None:
    if not items or not all(isinstance(item, dict) for item in items):
        return None
    keys = (key for key in _KEYS if all(key in item for item in items))
    # Two tolerations of one taint, TCP and UDP on one port: a key that items share tells nothing.
    return next((key for key in keys if len({str(item[key]) for item in items}) == len(items)), None)


def _amount(value: Any) -> Any:
    """Return a quantity as a number, anything else as it is."""
    try:
        return quantity(value)
    except ValueError:
        return value
