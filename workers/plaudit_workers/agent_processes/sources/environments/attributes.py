"""Collect the plain data that an environment's instance holds when its episode has ended, for reward functions."""

from __future__ import annotations

import contextlib
import inspect
import math
from typing import Any

import msgspec

MOST_BYTES = 64 << 10
"""Of all attributes of an instance together, as JSON."""
_DEEPEST = 32
_WHOLE = range(-(1 << 63), 1 << 64)
"""Integers that a message can hold."""


def public_attributes(instance: Any) -> dict[str, Any]:
    """Return the attributes that reward functions may read: public, no methods, what JSON holds.

    Attributes of the class and properties count too. One that is no plain data, raises when it is read, or exceeds
    what is left of ``MOST_BYTES`` is left out; small ones come first. Tuples become lists. Never raises.
    """
    found: dict[str, tuple[Any, int]] = {}
    for name in _names(instance):
        with contextlib.suppress(BaseException):  # the user's code: a property may raise anything
            value = plain(getattr(instance, name))
            found[name] = value, len(msgspec.json.encode({name: value}))
    kept, used = {}, 0
    for name, (value, size) in sorted(found.items(), key=lambda item: item[1][1]):
        if (used := used + size) > MOST_BYTES:
            break
        kept[name] = value
    return {name: kept[name] for name in found if name in kept}


def plain(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON's types.

    Raises:
        TypeError: JSON has no such value: an object, a number that is not finite, a key that is no text.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.encode(value).decode()
    if isinstance(value, int) and int(value) in _WHOLE:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if depth < _DEEPEST and isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in value]
    if depth < _DEEPEST and isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {str.encode(key).decode(): plain(item, depth + 1) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__} is no plain data")


def _names(instance: Any) -> list[str]:
    """Return the names of public attributes without those that the class defines as methods."""
    try:
        names = [name for name in dir(instance) if not name.startswith("_")]
        return [name for name in names if not inspect.isroutine(inspect.getattr_static(instance, name, None))]
    except BaseException:  # the user's code: __dir__ may be its own
        return []
