"""Detect drift: an object has drifted if it does not contain its manifest.

Fields that the API server adds (defaults, status) do not count. Quantities and empty values in another notation are
equal.
"""

from __future__ import annotations

from typing import Any

from plaudit_workers.job.spec.kubernetes.quantity import quantity

_QUANTITY_MAPS = ("requests", "limits", "hard")
_EMPTY: tuple[Any, ...] = (None, "", [], {}, 0, False)
_KEYS = ("name", "containerPort", "mountPath", "uid", "key")
"""Keys that identify items of a list; the first one that all items have applies."""


def differs(wanted: Any, observed: Any, field: str = "") -> bool:
    """Return True if ``observed`` lacks a part of ``wanted``.

    Args:
        wanted: the manifest, or a part of it.
        observed: the same part of the object in the API server.
        field: name of the field that both are values of.
    """
    if wanted == observed:
        return False
    if isinstance(wanted, dict):
        if observed is None:
            return any(value not in _EMPTY for value in wanted.values())
        if not isinstance(observed, dict):
            return True
        return any(_value_differs(key, value, observed.get(key), field) for key, value in wanted.items())
    if isinstance(wanted, list):
        return _list_differs(wanted, observed or [], field)
    return not (wanted in _EMPTY and observed in _EMPTY)


def _value_differs(key: str, wanted: Any, observed: Any, parent: str) -> bool:
    if (parent in _QUANTITY_MAPS or key == "sizeLimit") and observed is not None:
        return bool(_amount(wanted) != _amount(observed))
    return differs(wanted, observed, key)


def _list_differs(wanted: list[Any], observed: Any, field: str) -> bool:
    if not isinstance(observed, list):
        return True
    key = _key(wanted)
    if key is None:
        return len(wanted) != len(observed) or any(differs(a, b, field) for a, b in zip(wanted, observed, strict=True))
    by_key = {item.get(key): item for item in observed if isinstance(item, dict)}
    return any(item[key] not in by_key or differs(item, by_key[item[key]], field) for item in wanted)


def _key(items: list[Any]) -> str | None:
    if not items or not all(isinstance(item, dict) for item in items):
        return None
    return next((key for key in _KEYS if all(key in item for item in items)), None)


def _amount(value: Any) -> Any:
    """Return a quantity as a number, anything else as it is."""
    try:
        return quantity(value)
    except ValueError:
        return value
