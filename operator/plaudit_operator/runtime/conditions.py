"""Read the conditions of any Kubernetes object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Object = Mapping[str, Any]


def conditions_of(item: Object) -> Sequence[Object]:
    """Return the conditions of an object; none before its controller reported any."""
    return (item.get("status") or {}).get("conditions") or ()


def holds(item: Object, *kinds: str) -> bool:
    """Return True if one of these conditions is true."""
    return any(found["type"] in kinds and found["status"] == "True" for found in conditions_of(item))
