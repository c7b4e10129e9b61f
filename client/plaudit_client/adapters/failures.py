"""Return a number to trainers that accept nothing else."""

from __future__ import annotations

import math

from plaudit_client.adapters.missing_scores import note
from plaudit_client.result import Result


def number(result: Result, on_failure: float | str = "raise") -> float:
    """Return a sample's score, or the number that stands for a missing one; log a warning for a missing one.

    Args:
        on_failure: ``raise``, or the number for a sample without a score.

    Raises:
        NoScoreError: the sample has no score, and ``on_failure`` is ``raise``.
        ValueError: ``on_failure`` is neither ``raise`` nor a finite number.
    """
    note(result)
    if on_failure == "raise":
        return result.require_score()
    try:
        instead = float(on_failure)
    except ValueError:
        instead = math.nan
    if not math.isfinite(instead):
        raise ValueError(f"on_failure {on_failure!r}: give 'raise', or a finite number for samples without a score")
    return instead if result.score is None else result.score
