"""Strategies for what may come from outside: JSON beyond its common sense, and the shapes of requests around it."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

INTEGERS = st.integers() | st.sampled_from([2**63, -(2**63) - 1, 2**64, 10**30, 10**400])
TEXTS = st.text(st.characters(), max_size=20) | st.sampled_from(["\ud800", "\0", "a\r\nb", "💥", "x" * 5000, "{{", "/"])
SCALARS = st.none() | st.booleans() | INTEGERS | st.floats() | TEXTS
PLAIN_SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_infinity=False) | TEXTS


def _around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4)


JSON = st.recursive(SCALARS, _around, max_leaves=12)
"""Anything that ``json.dumps`` writes, NaN, huge integers and lone surrogates included."""
PLAIN = st.recursive(PLAIN_SCALARS, _around, max_leaves=6)
"""What passes the gate, mostly: texts may still meet in one key."""
DEEP = st.builds(
    lambda depth, opened: json.loads(opened * depth + "]" * depth), st.sampled_from([65, 900]), st.just("[")
)
VALUES = JSON | DEEP
BODIES = st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode())


def with_member(base: dict[str, Any], values: st.SearchStrategy[Any] = VALUES) -> st.SearchStrategy[dict[str, Any]]:
    """One or two members of an object replaced by any value, or added to it."""
    names = st.sampled_from([*base, "unknown"]) | TEXTS
    return st.dictionaries(names, values, min_size=1, max_size=2).map(lambda changes: {**base, **changes})
