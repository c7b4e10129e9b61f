"""Decide what follows the end of an attempt, of the trainer or of a rollout replica of several pods.

**The trainer.** The first rule of ``lifecycle.failurePolicy.rules`` that applies decides. Without one, an attempt that
the cluster ended (eviction, preemption, lost node, deleted pod, drain) is a disruption, which does not count as a
restart; exit codes 42 and 3 end the job; anything else counts as a restart.

**A replica of several pods** starts as a whole, and restarts as a whole when one of its pods ends. The Job of an
attempt fails with its first pod, and Kubernetes then ends the others. The Job of the next attempt is created suspended
before that, so that the count of attempts is kept; it is resumed once all pods before it are gone and its pause is
over.

The end of the container ``trainer`` or ``rollout`` ends the attempt in its pod, whatever sidecars still run there.

**Back-off**, of the trainer and of each replica: attempts that end early without progress follow each other more and
more slowly. An attempt is short if it closed no step and ran for less than ``backoff.resetAfterSeconds``. With the
defaults:

| short attempts in a row                              | 1 | 2 | 3 | 4 | 5 | 6 | 7 and more |
| pause before the next (seconds)                      | 0 | 10 | 20 | 40 | 80 | 160 | 300 |
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from plaudit_job.spec.rljob import BackoffSpec, FailurePolicySpec, FailureRuleSpec
from plaudit_operator import names, pod_state
from plaudit_operator.actions import Delete, Patch, suspend_job
from plaudit_operator.names import Reason
from plaudit_operator.observed import (
    Object,
    Observed,
    annotations_of,
    attempt_of,
    holds,
    labels,
    owner_uid,
    seconds,
    timestamp,
)
from plaudit_wire.backoff import backoff_s

RoleVerdict = Literal["absent", "running", "done", "failed", "disrupted", "final"]
_DECIDED: dict[str, tuple[RoleVerdict, str]] = {
    "Fail": ("final", Reason.FAILURE_RULE),
    "Count": ("failed", Reason.ATTEMPT_FAILED),
    "Ignore": ("disrupted", Reason.DISRUPTED),
}
"""Verdict and reason of a rule's action."""


@dataclass(frozen=True)
class TrainerAttempt:
    """Hold the trainer's current attempt."""

    number: int
    verdict: RoleVerdict
    reason: str = ""
    message: str = ""
    job: Object | None = None


def present_attempt(observed: Observed, rules: Sequence[FailureRuleSpec] = ()) -> TrainerAttempt:
    """Return the current attempt, judged by the rules of the job's failure policy."""
    jobs = {attempt_of(job): job for job in observed.jobs_of("trainer")}
    number = max([int(observed.status.get("attempt", 0)), *jobs])
    job = jobs.get(number)
    if job is None:
        return TrainerAttempt(number, "absent")
    pods = [pod for pod in observed.pods_of("trainer") if attempt_of(pod) == number]
    ends = [code for pod in pods for code, _ in pod_state.exit_of(pod, "trainer")]
    # A sidecar that ended badly fails the pod and its Job, even if the trainer is done.
    if holds(job, "Complete") or ends.count(0) == job["spec"].get("completions", 1):
        return TrainerAttempt(number, "done", Reason.TRAINER_DONE, "the trainer finished its last step", job)
    # Of a suspended Job the pods end because they are deleted.
    suspended = bool(job["spec"].get("suspend"))
    held = [pod for pod in pods if not suspended and pod_state.sidecars_left(pod, "trainer")]
    codes = {code for pod in held for code, _ in pod_state.exit_of(pod, "trainer")}
    if holds(job, "Failed", "FailureTarget") or codes - {0}:
        return _failed(number, job, pods, rules)
    return TrainerAttempt(number, "running", job=job)


def pods_missing(observed: Observed) -> bool:
    """Return True if an attempt failed and no pod shows how: they are deleted, or their events have not arrived."""
    attempt = present_attempt(observed)
    ended = (attempt_of(pod) for pod in observed.pods_of("trainer") if any(pod_state.exit_of(pod, "trainer")))
    return attempt.verdict == "disrupted" and attempt.number not in ended


def _failed(number: int, job: Object, pods: list[Object], rules: Sequence[FailureRuleSpec]) -> TrainerAttempt:
    exits = [(code, message) for pod in pods for code, message in pod_state.exit_of(pod, "trainer")]
    by_default = _by_default(number, job, pods, exits)
    reasons = {reason for pod in pods for reason in pod_state.failure_reasons(pod)}
    decided = _deciding_rule(rules, {code for code, _ in exits}, reasons)
    if decided is None:
        return by_default
    rule, why = decided
    verdict, reason = _DECIDED[rule.action]
    return replace(by_default, verdict=verdict, reason=reason, message=f"{by_default.message} ({why})")


def _by_default(number: int, job: Object, pods: list[Object], exits: list[tuple[int, str]]) -> TrainerAttempt:
    final = ((names.EXIT_NO_RETRY, Reason.DO_NOT_RETRY), (names.EXIT_FAILED, Reason.TOO_MANY_FAILED_SCORES))
    for code, reason in final:
        message = next((message for found, message in exits if found == code), None)
        if message is not None:
            return TrainerAttempt(number, "final", reason, f"the trainer exited with code {code}: {message}", job)
    if not exits and not any(map(pod_state.is_disrupted, pods)) and (failed := next(_failed_starts(pods), None)):
        name, code, message = failed
        text = f"attempt {number} of the trainer did not start: {name} exited with code {code}: {message}"
        return TrainerAttempt(number, "failed", Reason.ATTEMPT_FAILED, text, job)
    stopped = any(code == names.EXIT_STOPPED for code, _ in exits)
    if not exits or stopped or any(map(pod_state.is_disrupted, pods)) or _began_with_a_deletion(pods):
        message = f"the cluster ended attempt {number} of the trainer{_rejection(pods)}"
        return TrainerAttempt(number, "disrupted", Reason.DISRUPTED, message, job)
    code, message = max(exits, key=lambda found: (bool(found[1]), found[0]))
    text = f"attempt {number} of the trainer exited with code {code}: {message or 'no message'}"
    return TrainerAttempt(number, "failed", Reason.ATTEMPT_FAILED, text, job)


def _failed_starts(pods: list[Object]) -> Iterator[tuple[str, int, str]]:
    return (failed for pod in pods if (failed := pod_state.failed_start(pod)))


def _began_with_a_deletion(pods: list[Object]) -> bool:
    """Return True if the first pod that ended did so because it was deleted.

    The others fail without it, and a Job deletes those that are left after one failed: only the first end is a cause.
    """
    ends = {pod["metadata"]["name"]: at for pod in pods if (at := pod_state.ended_at(pod, "trainer")) is not None}
    first = [pod for pod in pods if ends.get(pod["metadata"]["name"]) == min(ends.values(), default=None)]
    return bool(ends) and all(pod_state.is_ended_by_deletion(pod, "trainer") for pod in first)


def _rejection(pods: list[Object]) -> str:
    """Return what kubelets reported about pods that they did not run; empty if they ran all."""
    for status in (pod.get("status") or {} for pod in pods):
        if status.get("phase") == "Failed" and status.get("reason"):
            return f" ({': '.join(str(status[key]) for key in ('reason', 'message') if status.get(key))})"
    return ""


def _deciding_rule(
    rules: Sequence[FailureRuleSpec], codes: Collection[int], reasons: Collection[str]
) -> tuple[FailureRuleSpec, str] | None:
    """Return the rule that decides, and the rule as text with what it applies to; None if none applies."""
    for number, rule in enumerate(rules):
        if match := _match(rule, codes, reasons):
            return rule, f"lifecycle.failurePolicy.rules[{number}]: {rule.action} on {match}"
    return None


def _match(rule: FailureRuleSpec, codes: Collection[int], reasons: Collection[str]) -> str:
    if (listed := rule.on_exit_codes) is not None:
        decides = (code for code in sorted(codes) if code != 0 and (code in listed.values) == (listed.operator == "In"))
        return next((f"exit code {code}" for code in decides), "")
    return next((f"reason {reason}" for reason in sorted(reasons) if reason in rule.on_reasons), "")


def exhausted(observed: Observed, attempt: TrainerAttempt, policy: FailurePolicySpec) -> tuple[str, str] | None:
    """Return reason and message if the end of ``attempt`` exceeds a limit of the policy, else None."""
    restarts, disruptions = (int(observed.status.get(counter, 0)) for counter in ("restarts", "disruptions"))
    if attempt.verdict == "failed" and restarts >= policy.max_restarts:
        limit = f"lifecycle.failurePolicy.maxRestarts is {policy.max_restarts}"
        return Reason.TOO_MANY_RESTARTS, f"{attempt.message}. No restarts are left ({limit})"
    if attempt.verdict == "disrupted" and disruptions >= policy.max_disruptions:
        limit = f"lifecycle.failurePolicy.maxDisruptions is {policy.max_disruptions}"
        return Reason.TOO_MANY_DISRUPTIONS, f"{attempt.message}. It was one disruption too many ({limit})"
    return None


def after_attempt(observed: Observed, attempt: TrainerAttempt, policy: BackoffSpec, now: float) -> dict[str, Any]:
    """Return the fields of the status that record the end of an attempt; ``now`` is in seconds since the epoch."""
    reported = (observed.progress, observed.status.get("progress") or {})
    step = max(int(progress.get("step") or 0) for progress in reported)  # the newest that was ever reported as closed
    progressed = step > int(observed.status.get("lastAttemptStep", 0))
    short = not progressed and _ran_s(observed, attempt, now) < policy.reset_after_seconds
    count = int(observed.status.get("shortAttempts", 0)) + 1 if short else 0
    return {"shortAttempts": count, "lastAttemptStep": step, "nextAttemptTime": timestamp(now + pause_s(count, policy))}


def pause_s(short_attempts: int, policy: BackoffSpec) -> float:
    """Return the pause before the next attempt, given how many in a row ended early (seconds)."""
    if short_attempts <= 1:
        return 0.0
    return backoff_s(short_attempts - 1, policy.initial_seconds, policy.max_seconds)


def left_s(observed: Observed, now: float) -> float:
    """Return the seconds until the next attempt may start; 0 if it may start now."""
    return max(0.0, (seconds(observed.status.get("nextAttemptTime")) or now) - now)


def _ran_s(observed: Observed, attempt: TrainerAttempt, now: float) -> float:
    """Return how long the pods of an attempt ran, or how old it is if they are deleted."""
    pods = [pod for pod in observed.pods_of("trainer") if attempt_of(pod) == attempt.number]
    if not pods and attempt.job is not None:
        return now - (seconds(attempt.job["metadata"].get("creationTimestamp")) or now)
    return max((end - start for pod in pods for start, end in _runs(pod)), default=0.0)


def _runs(pod: Object) -> Iterator[tuple[float, float]]:
    """Yield start and end of each container that ended."""
    for status in (pod.get("status") or {}).get("containerStatuses") or []:
        ended = status.get("state", {}).get("terminated") or {}
        start, end = seconds(ended.get("startedAt")), seconds(ended.get("finishedAt"))
        if start is not None and end is not None:
            yield start, end


@dataclass(frozen=True)
class ReplicaAttempt:
    """Hold one attempt of a replica."""

    replica: int
    """Number of the replica in its group, from 0."""
    number: int = 0
    short_attempts: int = 0
    """Attempts before this one that ended early, one after another."""

    @classmethod
    def of(cls, job: Object) -> ReplicaAttempt:
        """Return the attempt of a Job."""
        short = int(annotations_of(job).get(names.SHORT_ATTEMPTS, "0"))
        return cls(replica_of(job), attempt_of(job), short)


def replica_of(item: Object) -> int:
    """Return the number of the replica that a Job or a pod belongs to; -1 for a rollout of one pod."""
    return int(labels(item).get(names.LABEL_REPLICA, "-1"))


def group_of(item: Object) -> str:
    """Return the rollout group of an object; empty in a job without groups."""
    return labels(item).get(names.LABEL_ROLLOUT_GROUP, "")


@dataclass
class ReplicaDecision:
    """Hold the changes of the replicas of one group."""

    starts: list[ReplicaAttempt] = field(default_factory=list)
    """Attempts whose Jobs are missing."""
    changes: list[Delete | Patch] = field(default_factory=list)
    wait_s: float | None = None
    """Seconds until the next pause is over."""


def never_ran(job: Object, pods: Sequence[Object], template: str) -> bool:
    """Return True if a Job is to be replaced: none of its pods ran, and its pod template is not that of this digest."""
    made_from = annotations_of(job).get(names.TEMPLATE, template)
    return made_from != template and not pod_state.is_leaving(job) and not any(map(pod_state.has_run, pods))


def restored_sizes(observed: Observed) -> list[Patch]:
    """Return the changes that let Jobs run all of their pods again, where somebody lowered ``parallelism``."""
    cut = [job for job in observed.own("Job") if job["spec"].get("parallelism") != job["spec"].get("completions")]
    return [
        Patch("Job", meta["name"], {"metadata": {"uid": meta["uid"]}, "spec": {"parallelism": spec["completions"]}})
        for meta, spec in ((job["metadata"], job["spec"]) for job in cut if not pod_state.is_leaving(job))
    ]


def deletions_of_orphans(pods: Sequence[Object]) -> list[Delete]:
    """Return the deletions of pods that their Job left (``kubectl delete job --cascade=orphan``).

    Nobody would learn of their end, and another Job cannot take them over.
    """
    left = (pod for pod in pods if not pod_state.is_leaving(pod) and not owner_uid(pod))
    return [Delete.of("Pod", pod) for pod in left]


def decide_replicas(
    observed: Observed, group: str, template: str, count: int, policy: BackoffSpec, now: float
) -> ReplicaDecision:
    """Return the changes that bring a group (empty in a job without groups) closer to ``count`` running replicas.

    ``template`` is the digest of the group's frozen pod template.
    """
    decision = ReplicaDecision()
    jobs = [job for job in observed.jobs_of("rollout") if group_of(job) == group and replica_of(job) >= 0]
    pods = [pod for pod in observed.pods_of("rollout") if group_of(pod) == group and replica_of(pod) >= 0]
    for replica in sorted({*range(count), *map(replica_of, jobs)}):
        own_jobs = sorted((job for job in jobs if replica_of(job) == replica), key=attempt_of)
        own_pods = [pod for pod in pods if replica_of(pod) == replica]
        newest = own_jobs.pop() if own_jobs and replica < count else None
        decision.changes += [Delete.of("Job", job) for job in own_jobs if not pod_state.is_leaving(job)]
        if replica >= count:
            continue
        if newest is None:
            decision.changes += deletions_of_orphans(own_pods)
            if not own_pods:
                decision.starts.append(ReplicaAttempt(replica))
        elif _has_ended(newest, own_pods):
            decision.starts.append(_next_attempt(newest, policy, now))
        elif never_ran(newest, own_pods, template):
            decision.changes.append(Delete.of("Job", newest))
        elif newest["spec"].get("suspend"):
            earlier_pods = [pod for pod in own_pods if attempt_of(pod) < attempt_of(newest)]
            _resume(decision, newest, [*own_jobs, *earlier_pods], policy, now)
    return decision


def _has_ended(job: Object, pods: Sequence[Object]) -> bool:
    """Return True if a pod of the attempt ended, well or badly: the others cannot go on without it."""
    status = job.get("status") or {}
    if any(pod_state.sidecars_left(pod, "rollout") for pod in pods if attempt_of(pod) == attempt_of(job)):
        return True
    over = holds(job, "Failed", "FailureTarget", "Complete", "SuccessCriteriaMet")
    return over or bool(status.get("failed") or status.get("succeeded"))


def _next_attempt(ended: Object, policy: BackoffSpec, now: float) -> ReplicaAttempt:
    attempt = ReplicaAttempt.of(ended)
    started = seconds((ended.get("status") or {}).get("startTime")) or now
    short = attempt.short_attempts + 1 if now - started < policy.reset_after_seconds else 0
    return replace(attempt, number=attempt.number + 1, short_attempts=short)


def _resume(decision: ReplicaDecision, job: Object, earlier: Sequence[Object], policy: BackoffSpec, now: float) -> None:
    """Let an attempt start once nothing is left of those before it and its pause is over."""
    created = seconds(job["metadata"].get("creationTimestamp")) or now
    left_s = created + pause_s(ReplicaAttempt.of(job).short_attempts, policy) - now
    if left_s > 0:
        decision.wait_s = min(left_s, decision.wait_s or left_s)
    elif not earlier:
        decision.changes.append(suspend_job(job, suspend=False))
