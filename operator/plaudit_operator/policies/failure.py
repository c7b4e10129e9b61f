"""Failure policy: classify the end of a trainer's attempt, and decide whether there is another one.

The first rule of the job's policy that applies decides. Without one, an attempt that the cluster ended (eviction,
preemption, lost node, deleted pod, drain) is a disruption, which does not count as a restart; exit codes 42 and 3 end
the job; anything else counts as a restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from plaudit_operator import names
from plaudit_operator.names import Reason
from plaudit_operator.observed import Object, Observed, attempt_of
from plaudit_operator.pod_state import ended_at, exit_of, failure_reasons, is_disrupted, is_ended_by_deletion
from plaudit_operator.policies.failure_rules import deciding_rule
from plaudit_operator.runtime.conditions import holds
from plaudit_workers.job.spec.kubernetes.lifecycle import FailurePolicySpec, FailureRuleSpec

RoleVerdict = Literal["absent", "running", "done", "failed", "disrupted", "final"]


@dataclass(frozen=True)
class TrainerAttempt:
    """Hold the trainer's current attempt."""

    number: int
    verdict: RoleVerdict
    reason: str = ""
    message: str = ""
    job: Object | None = None


_DECIDED: dict[str, tuple[RoleVerdict, str]] = {
    "Fail": ("final", Reason.FAILURE_RULE),
    "Count": ("failed", Reason.ATTEMPT_FAILED),
    "Ignore": ("disrupted", Reason.DISRUPTED),
}
"""Verdict and reason of a rule's action."""


def present_attempt(observed: Observed, rules: Sequence[FailureRuleSpec] = ()) -> TrainerAttempt:
    """Return the current attempt, judged by the rules of the job's failure policy."""
    jobs = {attempt_of(job): job for job in observed.jobs_of("trainer")}
    number = max([int(observed.status.get("attempt", 0)), *jobs])
    job = jobs.get(number)
    if job is None:
        return TrainerAttempt(number, "absent")
    if holds(job, "Complete"):
        return TrainerAttempt(number, "done", Reason.TRAINER_DONE, "the trainer finished its last step", job)
    if holds(job, "Failed", "FailureTarget"):
        return _failed(observed, number, job, rules)
    return TrainerAttempt(number, "running", job=job)


def pods_missing(observed: Observed) -> bool:
    """Return True if an attempt failed and no pod shows how: they are deleted, or their events have not arrived."""
    attempt = present_attempt(observed)
    ended = (attempt_of(pod) for pod in observed.pods_of("trainer") if any(exit_of(pod, "trainer")))
    return attempt.verdict == "disrupted" and attempt.number not in ended


def _failed(observed: Observed, number: int, job: Object, rules: Sequence[FailureRuleSpec]) -> TrainerAttempt:
    pods = [pod for pod in observed.pods_of("trainer") if attempt_of(pod) == number]
    exits = [(code, message) for pod in pods for code, message in exit_of(pod, "trainer")]
    by_default = _by_default(number, job, pods, exits)
    reasons = {reason for pod in pods for reason in failure_reasons(pod)}
    decided = deciding_rule(rules, {code for code, _ in exits}, reasons)
    if decided is None:
        return by_default
    rule, why = decided
    verdict, reason = _DECIDED[rule.action]
    return replace(by_default, verdict=verdict, reason=reason, message=f"{by_default.message} ({why})")


def _by_default(number: int, job: Object, pods: list[Object], exits: list[tuple[int, str]]) -> TrainerAttempt:
    for code, reason in (
        (names.EXIT_NO_RETRY, Reason.DO_NOT_RETRY),
        (names.EXIT_FAILED, Reason.TOO_MANY_FAILED_SCORES),
    ):
        message = next((message for found, message in exits if found == code), None)
        if message is not None:
            return TrainerAttempt(number, "final", reason, f"the trainer exited with code {code}: {message}", job)
    stopped = any(code == names.EXIT_STOPPED for code, _ in exits)
    if not exits or stopped or any(map(is_disrupted, pods)) or _began_with_a_deletion(pods):
        message = f"the cluster ended attempt {number} of the trainer{_rejection(pods)}"
        return TrainerAttempt(number, "disrupted", Reason.DISRUPTED, message, job)
    code, message = max(exits, key=lambda found: (bool(found[1]), found[0]))
    text = f"attempt {number} of the trainer exited with code {code}: {message or 'no message'}"
    return TrainerAttempt(number, "failed", Reason.ATTEMPT_FAILED, text, job)


def _began_with_a_deletion(pods: list[Object]) -> bool:
    """Return True if the first pod that ended did so because it was deleted.

    The others fail without it, and a Job deletes those that are left after one failed: only the first end is a cause.
    """
    ends = {pod["metadata"]["name"]: at for pod in pods if (at := ended_at(pod, "trainer")) is not None}
    first = [pod for pod in pods if ends.get(pod["metadata"]["name"]) == min(ends.values(), default=None)]
    return bool(ends) and all(is_ended_by_deletion(pod, "trainer") for pod in first)


def _rejection(pods: list[Object]) -> str:
    """Return what kubelets reported about pods that they did not run; empty if they ran all."""
    statuses = [pod.get("status") or {} for pod in pods]
    reports = [
        ": ".join(str(status[key]) for key in ("reason", "message") if status.get(key))
        for status in statuses
        if status.get("phase") == "Failed" and status.get("reason")
    ]
    return f" ({reports[0]})" if reports else ""


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
