"""Conditions: what is said of a job, since when; and the phase that follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from plaudit_operator.names import Condition
from plaudit_operator.observed import timestamp

_MOST_WORDS = 4000
NEEDED = (Condition.TRANSPORT_READY, Condition.ROLLOUT_READY, Condition.REWARD_READY, Condition.TRAINER_RUNNING)
"""What all hold while a job runs, of those it has."""


@dataclass(frozen=True)
class Said:
    """One condition as it is now."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str = ""


def said(kind: str, holds: bool, reason: str, message: str = "") -> Said:
    """A condition that holds or does not."""
    return Said(kind, "True" if holds else "False", reason, message)


def merged(
    before: Sequence[Mapping[str, Any]], now_said: Iterable[Said], generation: int, now: float
) -> list[dict[str, Any]]:
    """The conditions to report: a time changes only with its status; what is not said now stays as it was."""
    known = {condition["type"]: dict(condition) for condition in before}
    for words in now_said:
        previous = known.get(words.type, {})
        same = previous.get("status") == words.status
        known[words.type] = {
            "type": words.type,
            "status": words.status,
            "reason": words.reason,
            "message": words.message[:_MOST_WORDS],
            "observedGeneration": generation,
            "lastTransitionTime": previous["lastTransitionTime"] if same else timestamp(now),
        }
    return [known[kind] for kind in _ORDER if kind in known]


_ORDER = (
    Condition.SPEC_VALID,
    Condition.ADMITTED,
    Condition.TRANSPORT_READY,
    Condition.ROLLOUT_READY,
    Condition.REWARD_READY,
    Condition.TRAINER_RUNNING,
    Condition.DEGRADED,
    Condition.SUSPENDED,
    Condition.COMPLETE,
    Condition.FAILED,
)


def phase(conditions: Sequence[Mapping[str, Any]], *, started: bool) -> str:
    """The conditions in one word.

    Args:
        conditions: as reported.
        started: whether the job ever ran.
    """
    holds = {condition["type"]: condition["status"] == "True" for condition in conditions}
    if holds.get(Condition.FAILED):
        return "Failed"
    if holds.get(Condition.COMPLETE):
        return "Complete"
    if holds.get(Condition.SUSPENDED):
        return "Suspended"
    if not holds.get(Condition.ADMITTED, False):
        return "Pending" if holds.get(Condition.SPEC_VALID) else "Invalid"
    if holds.get(Condition.DEGRADED):
        return "Degraded"
    return "Running" if started else "Starting"
