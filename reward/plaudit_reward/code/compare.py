"""Whether what a program printed, or a function returned, is what a test case expects: as lenient as verl.

verl's ``prime_code`` tries one comparison after another; these are its results. Printed text is right when it equals
the expected one, but for blank lines and blanks around lines, or when all lines are numbers that are close.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

_RELATIVE, _ABSOLUTE = 1e-5, 1e-8
"""Closeness of numbers: numpy's ``allclose``, which verl calls."""


def same_output(printed: str, expected: str) -> bool:
    """Whether a program printed what it should."""
    lines = printed.splitlines()
    if any("\n".join(form).strip() == expected.strip() for form in (lines, [line.strip() for line in lines])):
        return True
    wanted = [line.strip() for line in expected.split("\n") if line]
    lines = [line for line in lines if line]
    return lines == wanted or _close(lines, wanted)


def _close(lines: Sequence[str], wanted: Sequence[str]) -> bool:
    if len(lines) != len(wanted) or all(a.isdigit() and b.isdigit() for a, b in zip(lines, wanted, strict=True)):
        return False
    try:
        numbers = [(float(a), float(b)) for a, b in zip(lines, wanted, strict=True)]
    except ValueError:
        return False
    return all(a == b or (math.isfinite(b) and abs(a - b) <= _ABSOLUTE + _RELATIVE * abs(b)) for a, b in numbers)


def same_result(returned: Any, expected: str) -> bool:
    """Whether a function returned what it should.

    Args:
        returned: its result, tuples and number keys kept.
        expected: JSON text of the result, or of a list that holds it; keys that are numbers are compared as such.
    """
    wanted = _with_number_keys(json.loads(expected))
    value = list(returned) if isinstance(returned, tuple) else returned
    if bool(value == wanted):
        return True
    if not (isinstance(wanted, list) and wanted):
        return False
    if bool(value == wanted[0]):
        return True
    rows_are_tuples = isinstance(value, list) and bool(value) and isinstance(value[0], tuple)
    return rows_are_tuples and [list(row) if isinstance(row, tuple) else row for row in value] == wanted[0]


def _with_number_keys(wanted: Any) -> Any:
    inner = wanted[0] if isinstance(wanted, list) and wanted else wanted
    if not isinstance(inner, dict):
        return wanted
    try:
        return [{int(key): item for key, item in inner.items()}]
    except ValueError:
        return wanted
