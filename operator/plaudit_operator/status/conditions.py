"""Compute the conditions of a job, and the phase that follows from them.

Those that every tool understands (kstatus) follow from the others:

| the job                                                         | Ready | Reconciling | Stalled |
| all roles run, or it is complete                                | True  | False       | False   |
| starts, waits in its queue, or recovers                         | False | True        | False   |
| suspended by its user                                           | False | False       | False   |
| failed, was rejected, or waits after attempts that ended early  | False | False       | True    |
| runs, but its last edit was rejected                            | as its roles | False | True    |
| a service whose new revision is being rolled out                | as its roles | True  | False   |
| a service whose roll-out does not proceed                       | as its roles | False | True    |

``Degraded`` is true while a running job lacks pods or an object, or its metrics or its autoscaler report trouble.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from plaudit_operator.names import CONDITION_ORDER, NEEDED, ConditionType, Reason
from plaudit_operator.observed import Object, Observed, conditions_of, seconds, timestamp
from plaudit_operator.pod_state import lost_since
from plaudit_operator.runtime.kinds import HPA, SCALED_OBJECT
from plaudit_operator.status.roles import RoleState, lack_of

_Reported = Mapping[str, Any]
_MOST_CHARACTERS = 4000
_AUTOSCALER_KNOWS_AFTER_S = 120.0
"""Time from the last pod's readiness until an autoscaler can be expected to have metrics."""
_STALLING = {
    ConditionType.ADMITTED: (Reason.NAME_TAKEN, Reason.GANG_UNAVAILABLE),
    ConditionType.TRAINER_RUNNING: (Reason.BACK_OFF,),
    ConditionType.ROLLED_OUT: (Reason.ROLL_OUT_STUCK,),
}
"""Reasons of false conditions that do not pass by themselves."""
_FAILS = {
    SCALED_OBJECT.kind: {("Ready", "False"), ("Ready", "Unknown"), ("HPAActive", "False"), ("Fallback", "True")},
    HPA.kind: {("AbleToScale", "False"), ("ScalingActive", "False")},
}
"""Type and status of their conditions in trouble: KEDA 2.21, autoscaling/v2."""
_LOOK_AT = {
    SCALED_OBJECT.kind: "KEDA's pods and its network access to Redis",
    HPA.kind: "metrics-server (kubectl top pods)",
}
_NO_WORKERS = "ScalingDisabled"
"""Reason of an HPA whose Deployment is scaled to zero."""


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
    """Return the conditions to report, of the RLJob's present generation.

    ``lastTransitionTime`` changes only with the status. A condition that is not in ``current`` stays as it was.
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
    return [known[kind] for kind in CONDITION_ORDER if kind in known]


def phase(conditions: Sequence[Mapping[str, Any]], *, started: bool) -> str:
    """Return the phase: the conditions in one word. ``started`` is True if all of the job ever ran."""
    holds = {condition["type"]: condition["status"] == "True" for condition in conditions}
    # Degraded is also a job that lost an object which the cluster refuses: it is not pending.
    for kind in (ConditionType.FAILED, ConditionType.COMPLETE, ConditionType.SUSPENDED, ConditionType.DEGRADED):
        if holds.get(kind):
            return kind
    if not holds.get(ConditionType.ADMITTED, False):
        return "Invalid" if holds.get(ConditionType.SPEC_VALID) is False else "Pending"
    return "Running" if started else "Starting"


def summary(conditions: Sequence[_Reported]) -> list[Condition]:
    """Return the three conditions that follow from all others, as these are reported."""
    known = {condition["type"]: condition for condition in conditions}
    lack = next(_lacks(known), None)
    stall = next(_stalls(known), None)
    suspended = known.get(ConditionType.SUSPENDED, {})
    rests = suspended.get("status") == "True" and suspended["reason"] == Reason.SUSPENDED_BY_USER
    rolling = _is(known, ConditionType.ROLLED_OUT, "False") and not lack
    works = (bool(lack) or rolling) and not stall and not rests
    work = lack or (_why(known[ConditionType.ROLLED_OUT]) if rolling else None)
    complete = known.get(ConditionType.COMPLETE)
    ready = lack or (_why(complete) if complete else (Reason.READY, "all roles run"))
    nothing = (Reason.STALLED if stall else Reason.SUSPENDED_BY_USER if rests else Reason.READY, "")
    return [
        Condition.of(ConditionType.READY, not lack, *ready),
        Condition.of(ConditionType.RECONCILING, works, *(work if works and work else nothing)),
        Condition.of(ConditionType.STALLED, bool(stall), *(stall or (Reason.NOT_STALLED, ""))),
    ]


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
    for kind, reasons in _STALLING.items():
        if _is(known, kind, "False") and known[kind]["reason"] in reasons:
            yield _why(known[kind])


def _is(known: Mapping[str, _Reported], kind: str, status: str) -> bool:
    return kind in known and known[kind]["status"] == status


def _why(condition: _Reported) -> tuple[str, str]:
    return condition["reason"], condition["message"]


def healthy(reason: str = Reason.HEALTHY, message: str = "all pods are ready") -> Condition:
    """Return the condition of a job without trouble; of one that does not run, give why not."""
    return Condition.of(ConditionType.DEGRADED, False, reason, message)


def degraded(observed: Observed, roles: Mapping[str, RoleState], admitted: Condition, now: float) -> Condition:
    """Return the condition of a job that ran before; ``admitted`` is the condition of that type."""
    # Work does not wait for the metrics service: its start degrades nothing.
    missing = [role for role in roles.values() if not role.is_ready and (role.problem or role.name != "metrics")]
    redis_lost = any(lost_since(pod) is not None for pod in observed.pods_of("redis"))
    if redis_lost and any(role.name == "transport" for role in missing):
        message = (
            "the node of Redis is lost; the job waits for it. Redis's pod is never deleted by force: two of them on "
            "one volume would corrupt it. If the node will not return, delete the Node object"
        )
        return Condition.of(ConditionType.DEGRADED, True, Reason.NODE_LOST, message)
    if missing:
        return Condition.of(ConditionType.DEGRADED, True, *lack_of(missing))
    if admitted.status == "False":  # pods may all run and lack a Service or an autoscaler
        return Condition.of(ConditionType.DEGRADED, True, admitted.reason, admitted.message)
    if troubles := _troubles(observed, now):
        message = "; ".join(trouble["message"] for trouble in troubles)
        return Condition.of(ConditionType.DEGRADED, True, troubles[0]["reason"], message)
    return healthy()


def _troubles(observed: Observed, now: float) -> list[dict[str, str]]:
    """Return reason and message of trouble that no pod shows."""
    known = {**observed.status.get("progress", {}), **observed.progress}.get("troubles") or []
    settled = now - _all_ready_since(observed, now) >= _AUTOSCALER_KNOWS_AFTER_S
    return [*known, *(_autoscaler_troubles(observed) if settled else [])]


def _all_ready_since(observed: Observed, now: float) -> float:
    needed = [condition for kind in NEEDED if (condition := observed.condition(kind))]
    if any(condition["status"] != "True" for condition in needed):
        return now
    return max((seconds(condition["lastTransitionTime"]) or now for condition in needed), default=now)


def _autoscaler_troubles(observed: Observed) -> Iterator[dict[str, str]]:
    """Yield reason and message of what the reward workers' autoscaler reports, the same for as long as it lasts."""
    for kind in _FAILS:
        for autoscaler in observed.own(kind):
            name = autoscaler["metadata"]["name"]
            failing = _failing(kind, autoscaler)
            reported = ", ".join(f"{c['reason']}: {c.get('message', '')}".rstrip(" .:") for c in failing)
            if reported:
                problem = f"{kind} {name} cannot follow the load, so the number of reward workers is fixed: {reported}"
                remedy = f"Check {_LOOK_AT[kind]}; kubectl describe {kind.lower()} {name} shows more"
                yield {"reason": Reason.AUTOSCALER_FAILING, "message": f"{problem}. {remedy}"}


def _failing(kind: str, autoscaler: Object) -> Iterator[Object]:
    for condition in conditions_of(autoscaler):
        reason = condition.get("reason")  # without one it has not looked yet
        if (condition["type"], condition["status"]) in _FAILS[kind] and reason and reason != _NO_WORKERS:
            yield condition
