"""Rollout replicas of several pods: start each as a whole, and restart it as a whole when one of its pods ends.

The Job of an attempt fails with its first pod, and Kubernetes then ends the others. The Job of the next attempt is
created suspended before that, so that the count of attempts is kept; it is resumed once all pods before it are gone and
its pause is over. The pauses are those of the trainer (``policies/backoff.py``), counted for each replica.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from plaudit_operator.actions import Delete, Patch
from plaudit_operator.observed import Object, Observed, attempt_of, seconds
from plaudit_operator.policies.backoff import pause_s
from plaudit_operator.policies.suspend import suspend_job
from plaudit_operator.replica import ReplicaAttempt, group_of, replica_of
from plaudit_operator.runtime.conditions import holds
from plaudit_workers.job.spec.kubernetes.lifecycle import BackoffSpec


@dataclass
class ReplicaDecision:
    """Hold the changes of the replicas of one group."""

    starts: list[ReplicaAttempt] = field(default_factory=list)
    """Attempts whose Jobs are missing."""
    changes: list[Delete | Patch] = field(default_factory=list)
    wait_s: float | None = None
    """Seconds until the next pause is over."""


def decide(observed: Observed, group: str, count: int, policy: BackoffSpec, now: float) -> ReplicaDecision:
    """Return the changes that bring a group closer to its number of replicas.

    Args:
        group: name of the group; empty in a job without groups.
        count: replicas that are to run; 0 while the job is suspended.
        policy: pauses between attempts.
        now: seconds since the epoch.
    """
    decision = ReplicaDecision()
    jobs = [job for job in observed.jobs_of("rollout") if group_of(job) == group and replica_of(job) >= 0]
    pods = [pod for pod in observed.pods_of("rollout") if group_of(pod) == group and replica_of(pod) >= 0]
    for replica in sorted({*range(count), *map(replica_of, jobs)}):
        own_jobs = sorted((job for job in jobs if replica_of(job) == replica), key=attempt_of)
        own_pods = [pod for pod in pods if replica_of(pod) == replica]
        newest = own_jobs.pop() if own_jobs and replica < count else None
        decision.changes += _deletions(own_jobs)
        if replica >= count:
            continue
        if newest is None:
            if not own_pods:
                decision.starts.append(ReplicaAttempt(replica))
        elif has_ended(newest):
            decision.starts.append(_next_attempt(newest, policy, now))
        elif newest["spec"].get("suspend"):
            earlier_pods = [pod for pod in own_pods if attempt_of(pod) < attempt_of(newest)]
            _resume(decision, newest, [*own_jobs, *earlier_pods], policy, now)
    return decision


def has_ended(job: Object) -> bool:
    """Return True if a pod of the attempt ended, well or badly: the others cannot go on without it."""
    status = job.get("status") or {}
    return holds(job, *_OVER) or bool(status.get("failed") or status.get("succeeded"))


_OVER = ("Failed", "FailureTarget", "Complete", "SuccessCriteriaMet")


def _deletions(jobs: Sequence[Object]) -> Iterator[Delete]:
    for job in jobs:
        if not job["metadata"].get("deletionTimestamp"):
            yield Delete("Job", job["metadata"]["name"], job["metadata"]["uid"])


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
        decision.changes.append(suspend_job(job["metadata"]["name"], job["metadata"]["uid"], suspend=False))
