"""The condition ``Degraded``: a running job lacks pods or an object, or its metrics report trouble."""

from __future__ import annotations

from collections.abc import Mapping

from plaudit_operator.names import ConditionType, Reason
from plaudit_operator.observed import Observed, seconds
from plaudit_operator.pod_state import evicted_since
from plaudit_operator.status.autoscaler_state import autoscaler_troubles
from plaudit_operator.status.conditions import NEEDED, Condition
from plaudit_operator.status.roles import RoleState, lack_of

_AUTOSCALER_KNOWS_AFTER_S = 120.0
"""Time from the last pod's readiness until an autoscaler can be expected to have metrics."""


def healthy() -> Condition:
    """Return the condition of a job without trouble, or that is still starting."""
    return Condition.of(ConditionType.DEGRADED, False, Reason.HEALTHY, "all pods are ready")


def degraded(observed: Observed, roles: Mapping[str, RoleState], admitted: Condition, now: float) -> Condition:
    """Return the condition of a job that ran before.

    Args:
        admitted: whether all objects of the job exist.
        now: seconds since the epoch.
    """
    missing = [role for role in roles.values() if not role.is_ready]
    redis_lost = any(evicted_since(pod) is not None for pod in observed.pods_of("redis"))
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
    return [*known, *(autoscaler_troubles(observed) if settled else [])]


def _all_ready_since(observed: Observed, now: float) -> float:
    needed = [condition for kind in NEEDED if (condition := observed.condition(kind))]
    if any(condition["status"] != "True" for condition in needed):
        return now
    return max((seconds(condition["lastTransitionTime"]) or now for condition in needed), default=now)
