"""Back-off: attempts of the trainer that end early without progress follow each other more and more slowly.

An attempt is short if it closed no step and ran for less than ``backoff.resetAfterSeconds``. With the defaults:

| short attempts in a row                              | 1 | 2 | 3 | 4 | 5 | 6 | 7 and more |
| pause before the next (seconds)                      | 0 | 10 | 20 | 40 | 80 | 160 | 300 |
"""

from __future__ import annotations

from typing import Any

from plaudit_operator.observed import Object, Observed, attempt_of, seconds, timestamp
from plaudit_operator.policies.failure import TrainerAttempt
from plaudit_workers.job.spec.kubernetes.lifecycle import BackoffSpec


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
    return min(policy.max_seconds, policy.initial_seconds * 2.0 ** min(short_attempts - 2, 32))


def left_s(observed: Observed, now: float) -> float:
    """Return the seconds until the next attempt may start; 0 if it may start now."""
    return max(0.0, (seconds(observed.status.get("nextAttemptTime")) or now) - now)


def _ran_s(observed: Observed, attempt: TrainerAttempt, now: float) -> float:
    """Return how long the pods of an attempt ran, or how old it is if they are deleted."""
    pods = [pod for pod in observed.pods_of("trainer") if attempt_of(pod) == attempt.number]
    if not pods and attempt.job is not None:
        return now - (seconds(attempt.job["metadata"].get("creationTimestamp")) or now)
    return max((end - start for pod in pods for start, end in _runs(pod)), default=0.0)


def _runs(pod: Object) -> list[tuple[float, float]]:
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    ended = [status.get("state", {}).get("terminated") or {} for status in statuses]
    times = [(seconds(each.get("startedAt")), seconds(each.get("finishedAt"))) for each in ended]
    return [(start, end) for start, end in times if start is not None and end is not None]
