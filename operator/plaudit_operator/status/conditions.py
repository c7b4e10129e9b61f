"""The conditions of a job, and the phase that follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from plaudit_operator.names import ConditionType
from plaudit_operator.observed import timestamp

_MOST_CHARACTERS = 4000
NEEDED = (
    ConditionType.TRANSPORT_READY,
    ConditionType.ROLLOUT_READY,
    ConditionType.REWARD_READY,
    ConditionType.TRAINER_RUNNING,
)
"""Conditions that are all true while a job runs, as far as it has them."""


@dataclass(frozen=True)
class Condition:
    """Hold one condition as it is now, without its times."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str = ""

    @classmethod
    def of(cls, type_: str, holds: bool, reason: str, message: str = "") -> Condition:
        """Return a condition with status ``True`` or ``False``."""
        return cls(type_, "True" if holds else "False", reason, message)


def merged(
    before: Sequence[Mapping[str, Any]], current: Iterable[Condition], generation: int, now: float
) -> list[dict[str, Any]]:
    """Return the conditions to report.

    ``lastTransitionTime`` changes only with the status. A condition that is not in ``current`` stays as it was.

    Args:
        before: as last reported.
        generation: of the RLJob that they describe.
        now: seconds since the epoch.
    """
    known = {condition["type"]: dict(condition) for condition in before}
    for condition in current:
        previous = known.get(condition.type, {})
        same = previous.get("status") == condition.status
        known[condition.type] = {
            "type": condition.type,
            "status": condition.status,
            "reason": condition.reason,
            "message": condition.message[:_MOST_CHARACTERS],
            "observedGeneration": generation,
            "lastTransitionTime": previous["lastTransitionTime"] if same else timestamp(now),
        }
    return [known[kind] for kind in _ORDER if kind in known]


_ORDER = (
    ConditionType.SPEC_VALID,
    ConditionType.ADMITTED,
    ConditionType.TRANSPORT_READY,
    ConditionType.ROLLOUT_READY,
    ConditionType.REWARD_READY,
    ConditionType.TRAINER_RUNNING,
    ConditionType.ROLLED_OUT,
    ConditionType.DEGRADED,
    ConditionType.SUSPENDED,
    ConditionType.COMPLETE,
    ConditionType.FAILED,
    ConditionType.READY,
    ConditionType.RECONCILING,
    ConditionType.STALLED,
)


def phase(conditions: Sequence[Mapping[str, Any]], *, started: bool) -> str:
    """Return the phase: the conditions in one word.

    Args:
        started: True if all of the job ever ran.
    """
    holds = {condition["type"]: condition["status"] == "True" for condition in conditions}
    if holds.get(ConditionType.FAILED):
        return "Failed"
    if holds.get(ConditionType.COMPLETE):
        return "Complete"
    if holds.get(ConditionType.SUSPENDED):
        return "Suspended"
    if holds.get(ConditionType.DEGRADED):  # also where the cluster refuses an object that the job lost
        return "Degraded"
    if not holds.get(ConditionType.ADMITTED, False):
        return "Pending" if holds.get(ConditionType.SPEC_VALID) else "Invalid"
    return "Running" if started else "Starting"
