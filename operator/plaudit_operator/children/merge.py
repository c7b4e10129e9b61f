"""Apply ``pod.template`` to a finished pod template as a Kubernetes strategic merge patch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
"""The ``patchMergeKey`` of the lists of a pod; all other lists are replaced as a whole."""


def strategic_merge(base: Any, patch: Any, field: str = "") -> Any:
    """Return ``base`` with ``patch`` applied; a null removes a field."""
    if isinstance(base, Mapping) and isinstance(patch, Mapping):
        merged = {**base}
        for key, value in patch.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = strategic_merge(base[key], value, key) if key in base else value
        return merged
    key = _MERGE_KEYS.get(field)
    if key and isinstance(base, list) and isinstance(patch, list):
        patches = {item.get(key): item for item in patch}
        pairs = [(item, patches.pop(item.get(key), None)) for item in base]
        kept = [item if change is None else strategic_merge(item, change) for item, change in pairs]
        return kept + list(patches.values())
    return patch
