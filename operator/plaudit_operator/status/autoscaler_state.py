"""Trouble that the autoscaler of the reward workers reports about itself."""

from __future__ import annotations

from collections.abc import Iterator

from plaudit_operator.names import Reason
from plaudit_operator.observed import Object, Observed
from plaudit_operator.runtime.kinds import HPA, SCALED_OBJECT

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
"""The reason of an HPA whose Deployment is scaled to zero."""


def autoscaler_troubles(observed: Observed) -> Iterator[dict[str, str]]:
    """Yield reason and message, the same for as long as the trouble lasts."""
    for kind in _FAILS:
        for autoscaler in observed.own(kind):
            name = autoscaler["metadata"]["name"]
            reported = ", ".join(
                f"{c['reason']}: {c.get('message', '')}".rstrip(" .:") for c in _failing(kind, autoscaler)
            )
            if reported:
                problem = f"{kind} {name} cannot follow the load, so the number of reward workers is fixed: {reported}"
                remedy = f"Check {_LOOK_AT[kind]}; kubectl describe {kind.lower()} {name} shows more"
                yield {"reason": Reason.AUTOSCALER_FAILING, "message": f"{problem}. {remedy}"}


def _failing(kind: str, autoscaler: Object) -> Iterator[Object]:
    for condition in autoscaler.get("status", {}).get("conditions") or []:
        reason = condition.get("reason")  # without one it has not looked yet
        if (condition["type"], condition["status"]) in _FAILS[kind] and reason and reason != _NO_WORKERS:
            yield condition
