"""Deadlines: a job that does not start in time fails and frees its resources; one that runs too long ends."""

from __future__ import annotations

from dataclasses import dataclass

from plaudit_operator.names import ConditionType, Reason
from plaudit_operator.observed import Observed, seconds
from plaudit_workers.job.spec.kubernetes.lifecycle import LifecycleSpec


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
        begin = max(seconds(observed.job["metadata"]["creationTimestamp"]) or now, resumed)
        message = f"not all pods ran within {limit} s (lifecycle.preRunningDeadlineSeconds): {_missing(observed)}"
        return Deadline(Reason.PRE_RUNNING_DEADLINE, message, begin + limit - now)
    if lifecycle.active_deadline_seconds is None:
        return None
    limit = lifecycle.active_deadline_seconds
    message = f"the job ran longer than {limit} s (lifecycle.activeDeadlineSeconds)"
    return Deadline(Reason.ACTIVE_DEADLINE, message, max(started, resumed) + limit - now)


def _resumed(observed: Observed, now: float) -> float:
    """Return when the last suspension ended; now if its end is not reported yet."""
    condition = observed.condition(ConditionType.SUSPENDED)
    if condition.get("status") == "True":
        return now
    return seconds(condition.get("lastTransitionTime")) or 0.0


def _missing(observed: Observed) -> str:
    """Return the last messages of the roles that were not ready."""
    waited = (
        ConditionType.ADMITTED,
        ConditionType.TRANSPORT_READY,
        ConditionType.ROLLOUT_READY,
        ConditionType.REWARD_READY,
        ConditionType.TRAINER_RUNNING,
    )
    conditions = [observed.condition(type_) for type_ in waited]
    missing = [f"{c['type']}: {c['message']}" for c in conditions if c.get("status") == "False" and c.get("message")]
    return "; ".join(missing) or "some pods were not ready"
