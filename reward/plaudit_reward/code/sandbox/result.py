"""Encode a function's result as JSON that keeps what JSON does not: tuples, and keys that are no strings."""

from __future__ import annotations

import json
from typing import Any


def encode_result(value: Any) -> str:
    """Write a result.

    Raises:
        TypeError, ValueError, RecursionError: JSON has no form for it.
    """
    json.dumps(value)
    return json.dumps(_tagged(value))


def _tagged(value: Any) -> Any:
    if isinstance(value, dict):
        return ["dict", [[_tagged(key), _tagged(item)] for key, item in value.items()]]
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [kind, [_tagged(item) for item in value]]
    return value
