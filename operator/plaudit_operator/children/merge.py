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
        return _merge_lists(base, patch, key)
    return patch


def _merge_lists(base: list[Any], patch: list[Any], key: str) -> list[Any]:
    patches = {item.get(key): item for item in patch}
    merged = [strategic_merge(item, patches.pop(item.get(key))) if item.get(key) in patches else item for item in base]
    return merged + list(patches.values())
