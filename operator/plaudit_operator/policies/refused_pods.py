"""Pods that the API server refuses to create: a quota, an admission policy.

A Deployment reports it in its condition ``ReplicaFailure``. Jobs and StatefulSets only emit events, which the operator
does not watch: ``planning/pod_refusals.py`` lists the events of objects that lack pods.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from plaudit_operator.observed import Object, Observed, owner_uid, seconds
from plaudit_operator.runtime.conditions import holds

REASON_OF_EVENTS = "FailedCreate"
_PODS_WITHIN_S = 3.0
"""Time from the creation of an object until its pods usually exist."""
FIRST_LOOK_AFTER_S = 5.0
_FORBIDDEN = "is forbidden: "


def lacking(observed: Observed) -> list[Object]:
    """Return the Jobs and StatefulSets that want more pods than exist."""
    present = Counter(map(owner_uid, observed.pods))
    owners = [*observed.own("Job"), *observed.own("StatefulSet")]
    return [owner for owner in owners if _wanted(owner) > present[owner["metadata"]["uid"]]]


def _wanted(owner: Object) -> int:
    spec = owner["spec"]
    if owner["metadata"].get("deletionTimestamp"):
        return 0
    if owner["kind"] == "StatefulSet":
        return int(spec.get("replicas", 1))
    return 0 if holds(owner, "Complete", "Failed") or spec.get("suspend") else int(spec["parallelism"])


def is_overdue(owner: Object, now: float) -> bool:
    """Return True if an object is old enough that its pods should exist."""
    return now - (seconds(owner["metadata"].get("creationTimestamp")) or now) >= _PODS_WITHIN_S


def refusal_of(events: Iterable[Object]) -> str:
    """Return the newest refusal among events of one object; empty if there is none."""
    newest = max(events, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""), default={})
    return without_pod_name(str(newest.get("message", "")))


def without_pod_name(message: str) -> str:
    """Return the cause in an API server's refusal of a pod, without the pod's random name."""
    return message.partition(_FORBIDDEN)[2] or message
