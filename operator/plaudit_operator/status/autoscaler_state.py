"""What the autoscaler of the reward workers says of itself: whether their number follows the load."""

from __future__ import annotations

from collections.abc import Iterator

from plaudit_operator.names import Reason
from plaudit_operator.observed import Object, Observed
from plaudit_operator.runtime.kinds import HPA, SCALED_OBJECT

_FAILS = {
    SCALED_OBJECT.kind: {("Ready", "False"), ("Ready", "Unknown"), ("HPAActive", "False"), ("Fallback", "True")},
    HPA.kind: {("AbleToScale", "False"), ("ScalingActive", "False")},
}
"""Type and status of what they say then: KEDA 2.21, autoscaling/v2."""
_LOOK_AT = {
    SCALED_OBJECT.kind: "KEDA's pods, and whether it may reach Redis",
    HPA.kind: "metrics-server (kubectl top pods)",
}
_NO_WORKERS = "ScalingDisabled"
"""The reason of an HPA whose Deployment has no pods: it rests."""


def autoscaler_troubles(observed: Observed) -> Iterator[dict[str, str]]:
    """Reason and words, the same as long as it lasts."""
    for kind in _FAILS:
        for autoscaler in observed.own(kind):
            name = autoscaler["metadata"]["name"]
            said = ", ".join(f"{c['reason']}: {c.get('message', '')}".rstrip(" .:") for c in _failing(kind, autoscaler))
            if said:
                words = f"{kind} {name} cannot follow the load, the number of reward workers stays as it is: {said}"
                remedy = f"kubectl describe {kind.lower()} {name} says more; look at {_LOOK_AT[kind]}"
                yield {"reason": Reason.AUTOSCALER_FAILING, "message": f"{words}. {remedy}"}


def _failing(kind: str, autoscaler: Object) -> Iterator[Object]:
    for condition in autoscaler.get("status", {}).get("conditions") or []:
        reason = condition.get("reason")  # none: it has not looked yet
        if (condition["type"], condition["status"]) in _FAILS[kind] and reason and reason != _NO_WORKERS:
            yield condition
