"""A function's result as text that keeps what JSON does not: tuples, and keys that are no strings."""

from __future__ import annotations

import json
from typing import Any


def encode_value(value: Any) -> str:
    """Writes a result.

    Raises:
        TypeError, ValueError, RecursionError: it is nothing that JSON knows.
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


def decode_value(text: bytes) -> Any:
    """Reads what ``encode_value`` wrote, or what a program that found the pipe wrote in its place.

    Raises:
        ValueError, RecursionError: it is no such text.
    """
    return _plain(json.loads(text))


def _plain(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    try:
        kind, items = value
        if kind == "dict":
            return {_plain(key): _plain(item) for key, item in items}
        plain = [_plain(item) for item in items]
        return {"list": list, "tuple": tuple}[kind](plain)
    except (TypeError, KeyError) as error:
        raise ValueError("no value") from error
