"""The conditions that every tool understands (kstatus): ``Ready``, ``Reconciling``, ``Stalled``.

They follow from the other conditions:

| the job                                                         | Ready | Reconciling | Stalled |
| all roles run, or it is complete                                | True  | False       | False   |
| starts, waits in its queue, or recovers                         | False | True        | False   |
| suspended by its user                                           | False | False       | False   |
| failed, was rejected, or waits after attempts that ended early  | False | False       | True    |
| runs, but its last edit was rejected                            | as its roles | False | True    |
| a service whose new revision is being rolled out                | as its roles | True  | False   |
| a service whose roll-out does not proceed                       | as its roles | False | True    |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from plaudit_operator.names import ConditionType, Reason
from plaudit_operator.status.conditions import NEEDED, Condition

_NEEDS_A_PERSON = (Reason.NAME_TAKEN, Reason.GANG_UNAVAILABLE)
"""Reasons of ``Admitted`` that do not pass by themselves."""

_Reported = Mapping[str, Any]


def summary(conditions: Sequence[_Reported]) -> list[Condition]:
    """Return the three conditions that follow from all others, as these are reported."""
    known = {condition["type"]: condition for condition in conditions}
    lack = next(_lacks(known), None)
    stall = next(_stalls(known), None)
    rests = (
        _is(known, ConditionType.SUSPENDED, "True")
        and known[ConditionType.SUSPENDED]["reason"] == Reason.SUSPENDED_BY_USER
    )
    rolling = _is(known, ConditionType.ROLLED_OUT, "False") and not lack
    works = (bool(lack) or rolling) and not stall and not rests
    work = lack or (_why(known[ConditionType.ROLLED_OUT]) if rolling else None)
    ready = Condition(ConditionType.READY, "False", *lack) if lack else _ready(known)
    nothing = (Reason.STALLED if stall else Reason.SUSPENDED_BY_USER if rests else Reason.READY, "")
    return [
        ready,
        Condition.of(ConditionType.RECONCILING, works, *(work if works and work else nothing)),
        Condition.of(ConditionType.STALLED, bool(stall), *(stall or (Reason.NOT_STALLED, ""))),
    ]


def _ready(known: Mapping[str, _Reported]) -> Condition:
    complete = known.get(ConditionType.COMPLETE)
    if complete:
        return Condition(ConditionType.READY, "True", *_why(complete))
    return Condition(ConditionType.READY, "True", Reason.READY, "all roles run")


def _lacks(known: Mapping[str, _Reported]) -> Iterator[tuple[str, str]]:
    """Yield reason and message of each condition that keeps the job from being ready, the most telling one first."""
    if _is(known, ConditionType.COMPLETE, "True"):
        return
    for kind in (ConditionType.FAILED, ConditionType.SUSPENDED):
        if _is(known, kind, "True"):
            yield _why(known[kind])
    for kind in (ConditionType.ADMITTED, *NEEDED):
        if _is(known, kind, "False"):
            yield _why(known[kind])


def _stalls(known: Mapping[str, _Reported]) -> Iterator[tuple[str, str]]:
    """Yield reason and message of each condition that will not pass by itself."""
    if _is(known, ConditionType.COMPLETE, "True"):
        return
    if _is(known, ConditionType.FAILED, "True"):
        yield _why(known[ConditionType.FAILED])
    if _is(known, ConditionType.SPEC_VALID, "False"):
        yield _why(known[ConditionType.SPEC_VALID])
    for kind, reasons in _STALLING:
        if _is(known, kind, "False") and known[kind]["reason"] in reasons:
            yield _why(known[kind])


_STALLING = (
    (ConditionType.ADMITTED, _NEEDS_A_PERSON),
    (ConditionType.TRAINER_RUNNING, (Reason.BACK_OFF,)),
    (ConditionType.ROLLED_OUT, (Reason.ROLL_OUT_STUCK,)),
)


def _is(known: Mapping[str, _Reported], kind: str, status: str) -> bool:
    return kind in known and known[kind]["status"] == status


def _why(condition: _Reported) -> tuple[str, str]:
    return condition["reason"], condition["message"]
