"""Check a row's ground truth for a rule."""

from __future__ import annotations

from typing import Any

from plaudit_wire.errors import DataError


def text_truth(ground_truth: Any, rule: str) -> str:
    """Return the ground truth; raise ``DataError`` if it is not text.

    verl compares the answer with a ground truth of any type, and so scores such rows 0 or ends the run.
    """
    if isinstance(ground_truth, str):
        return ground_truth
    raise DataError(f"ground_truth is {ground_truth!r} ({type(ground_truth).__name__}); {rule} needs it as text")
