"""Own the fields of created objects as server-side apply does, so that a later apply removes what it omits.

A POST records its fields for the operation Update, which an apply by the same manager leaves alone. The operator still
creates by POST: only that fails if any object has the name. So the first apply moves these fields to its operation.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

ManagedFields = Mapping[str, Any]


def applied_fields(entries: Sequence[ManagedFields], manager: str) -> list[ManagedFields] | None:
    """Return ``metadata.managedFields`` with all fields of a manager under the operation Apply; None if they are.

    ``spec.replicas`` is left without an owner: an apply without it would set it to 1.
    """
    own = [entry for entry in entries if entry.get("manager") == manager and not entry.get("subresource")]
    if all(entry.get("operation") == "Apply" for entry in own):
        return None
    fields: dict[str, Any] = {}
    for entry in own:
        fields = _union(fields, entry.get("fieldsV1") or {})
    fields.get("f:spec", {}).pop("f:replicas", None)
    applied = {**own[-1], "operation": "Apply", "fieldsV1": fields}
    return [*(entry for entry in entries if entry not in own), applied]


def _union(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    union = {**copy.deepcopy(dict(left))}
    for key, value in right.items():
        union[key] = _union(union.get(key, {}), value)
    return union
