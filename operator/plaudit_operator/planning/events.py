"""Events on an RLJob, as ``kubectl describe`` shows them."""

from __future__ import annotations

from typing import Any

from plaudit_operator.actions import EmitEvent, Manifest
from plaudit_operator.names import FIELD_MANAGER
from plaudit_operator.observed import Object, timestamp
from plaudit_operator.runtime.kinds import EVENT

_MOST_CHARACTERS = 1024
"""The API server rejects longer messages."""


def event_manifest(job: Object, event: EmitEvent, now: float) -> Manifest:
    """Return the Event object of an RLJob; ``now`` is in seconds since the epoch."""
    metadata: dict[str, Any] = job["metadata"]
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.kind,
        "metadata": {"generateName": f"{metadata['name']}.", "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": job["apiVersion"],
            "kind": job["kind"],
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
        "type": event.kind,
        "reason": event.reason,
        "message": event.message[:_MOST_CHARACTERS],
        "source": {"component": FIELD_MANAGER},
        "firstTimestamp": timestamp(now),
        "lastTimestamp": timestamp(now),
        "count": 1,
    }
