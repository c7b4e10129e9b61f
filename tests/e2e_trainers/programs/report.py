"""What a program of a trainer prints: its progress, and at the end how its samples were scored."""

from __future__ import annotations

import json
from collections.abc import Iterable

from rewards import expected


def progress(count: int) -> None:
    """Print how many samples or steps are done; the test ends parts of the service meanwhile."""
    print(f"progress {count}", flush=True)


def report(samples: Iterable[tuple[str, int, float | None]], **figures: object) -> None:
    """Print the counts of samples: scored, without a score, and with another result than the reward gives.

    Args:
        samples: response, row and score of each; None for none.
        figures: printed with them.
    """
    counts = {"scored": 0, "failed": 0, "wrong": 0}
    for response, row, score in samples:
        counts["failed" if score is None else "scored"] += 1
        counts["wrong"] += not _equal(score, expected(response, row))
    print(json.dumps({**counts, **figures}), flush=True)


def _equal(score: float | None, right: float | None) -> bool:
    return score is right if score is None or right is None else abs(score - right) < 1e-6
