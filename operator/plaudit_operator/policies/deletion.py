"""Order the end of a deleted job: its trainer finishes its update and saves, then Redis goes.

Garbage collection deletes the children of a deleted RLJob at once, also while no operator runs. Redis's StatefulSet and
Service therefore name the trainer's first pod as a second owner: an object is collected when all of its owners are
gone. The trainer's grace period is shortened from ten minutes to two, so that GPUs are free soon. To keep the last
steps of a longer update, suspend a job before deleting it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from plaudit_operator import names
from plaudit_operator.actions import Delete
from plaudit_operator.observed import Object, Observed, attempt_of, labels
from plaudit_operator.pod_state import is_leaving

_GRACE_S = 120
_OUTLIVING = ("StatefulSet", "Service")
"""Kinds of Redis's objects that a trainer needs to its end; its pod has mounted the Secret already."""

Manifest = dict[str, Any]


def outliving_trainer(manifest: Manifest, observed: Observed) -> Manifest:
    """Return the manifest of a child, owned by the trainer's first pod too if the trainer needs it to its end."""
    if manifest["kind"] not in _OUTLIVING or labels(manifest).get(names.LABEL_ROLE) != "redis":
        return manifest
    pods = [pod for pod in observed.pods_of("trainer") if not is_leaving(pod)]
    if not pods:
        return manifest
    first = min(pods, key=lambda pod: (-attempt_of(pod), str(pod["metadata"]["name"])))["metadata"]
    owner = {"apiVersion": "v1", "kind": "Pod", "name": first["name"], "uid": first["uid"]}
    metadata = manifest["metadata"]
    return {**manifest, "metadata": {**metadata, "ownerReferences": [*metadata["ownerReferences"], owner]}}


def hurry(pods: Iterable[Object]) -> list[Delete]:
    """Return the deletions that shorten the grace period of the trainers among the pods of deleted jobs."""
    return [
        Delete("Pod", pod["metadata"]["name"], pod["metadata"]["uid"], grace_s=_GRACE_S)
        for pod in pods
        if labels(pod).get(names.LABEL_ROLE) == "trainer"
        and int(pod["metadata"].get("deletionGracePeriodSeconds") or 0) > _GRACE_S
    ]
