"""Write samples as JSON. Each sample is written by its caller, so that only its caller gets the error."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from plaudit_client.errors import InvalidSampleError


def encode_sample(sample: Mapping[str, Any], id: str = "") -> bytes:  # noqa: A002 (the field's name)
    """Return a sample as JSON, under this id (empty: its own, if it has one).

    Arrays and scalars of NumPy and torch become lists and numbers, tuples and sets become lists.

    Raises:
        InvalidSampleError: it is not a mapping with a ``response``, or has a value that JSON cannot hold.
    """
    if not isinstance(sample, Mapping):
        raise InvalidSampleError(f"a sample is a mapping with at least response, not {type(sample).__name__}")
    if not isinstance(sample.get("response"), str):
        raise InvalidSampleError(f"response: give the generated text, not {type(sample.get('response')).__name__}")
    written = {**sample, "id": id} if id else dict(sample)
    try:
        return json.dumps(written, default=_plain, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidSampleError(f"the sample cannot be written as JSON: {error}") from error


def batch(path_items: Iterable[bytes], field: str) -> bytes:
    """Return the body of a request with several samples or groups."""
    return b'{"' + field.encode() + b'":[' + b",".join(path_items) + b"]}"


def _plain(value: Any) -> Any:
    """Convert a value that ``json`` does not know."""
    if isinstance(value, (set, frozenset)):
        return list(value)
    for method in ("tolist", "item"):
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError(f"{type(value).__name__} is not a JSON value")
