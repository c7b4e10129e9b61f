"""What rules ask of a row's ground truth."""

from __future__ import annotations

from typing import Any

from plaudit_reward.errors import DataError


def text_truth(ground_truth: Any, rule: str) -> str:
    """The ground truth, which must be text.

    verl compares the answer with whatever is there, and so gives such rows 0 or ends the run.

    Raises:
        DataError: it is something else.
    """
    if isinstance(ground_truth, str):
        return ground_truth
    raise DataError(f"ground_truth is {ground_truth!r} ({type(ground_truth).__name__}); {rule} needs it as text")
