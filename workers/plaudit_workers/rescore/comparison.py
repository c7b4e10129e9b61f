"""Compare two scores of each sample, in bounded memory.

- agreement: the share of samples with the same score (to 1e-9), of those that have one both times
- rank correlation: Spearman's rho, the linear correlation of the scores' ranks, ties at their mean rank
  (Spearman, 1904); None where either has only one value
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from plaudit_metrics.statistics.failures import Failure

_SAME = 1e-9
_MOST_RANKED = 1_000_000
"""Pairs that ranks are computed of; of more, a random sample of so many."""


class ScoreChange(msgspec.Struct, frozen=True):
    """Hold one sample whose score changed."""

    step: int
    group: str
    index: int
    before: float
    after: float
    response: str
    """Its first characters."""


class Summary(msgspec.Struct, frozen=True):
    """Summarize all samples."""

    samples: int
    outcomes_before: dict[str, int]
    outcomes_after: dict[str, int]
    scored_both: int
    """Samples with two scores; the following fields are about them."""
    mean_before: float | None
    mean_after: float | None
    mean_change: float | None
    agreement: float | None
    rank_correlation: float | None
    changed_most: list[ScoreChange]
    """By how much, the most first."""
    failures: list[Failure] = []
    """Why samples have no score now, by scorer and kind, the most frequent first."""


class ScoreComparison:
    """Collect pairs of scores; ``summary`` compares them and lists the ``num_changes`` that changed most."""

    def __init__(self, num_changes: int = 10) -> None:
        self._num_changes = num_changes
        self._random = random.Random(0)
        self._before: Counter[str] = Counter()
        self._after: Counter[str] = Counter()
        self._scored = self._same = 0
        self._sum_before = self._sum_after = 0.0
        self._pairs: list[tuple[float, float]] = []
        self._changes: list[tuple[float, int, ScoreChange]] = []
        self._order = itertools.count(0, -1)

    def add_outcomes(self, before: str, after: str) -> None:
        """Add one sample's outcomes."""
        self._before[before] += 1
        self._after[after] += 1

    def add_scores(self, change: ScoreChange) -> None:
        """Add one sample with two scores."""
        self._scored += 1
        self._sum_before += change.before
        self._sum_after += change.after
        size = abs(change.after - change.before)
        self._same += size <= _SAME
        if size > _SAME:
            heapq.heappush(self._changes, (size, next(self._order), change))
            if len(self._changes) > self._num_changes:
                heapq.heappop(self._changes)
        # A uniform random sample of the pairs (reservoir sampling).
        pair = change.before, change.after
        if len(self._pairs) < _MOST_RANKED:
            self._pairs.append(pair)
        elif (place := self._random.randrange(self._scored)) < _MOST_RANKED:
            self._pairs[place] = pair

    def summary(self) -> Summary:
        """Return the comparison of all samples so far."""
        n = self._scored
        return Summary(
            samples=self._before.total(),
            outcomes_before=dict(self._before.most_common()),
            outcomes_after=dict(self._after.most_common()),
            scored_both=n,
            mean_before=self._sum_before / n if n else None,
            mean_after=self._sum_after / n if n else None,
            mean_change=(self._sum_after - self._sum_before) / n if n else None,
            agreement=self._same / n if n else None,
            rank_correlation=rank_correlation(np.array(self._pairs).reshape(-1, 2)),
            changed_most=[change for *_, change in sorted(self._changes, key=lambda one: one[:2], reverse=True)],
        )


def rank_correlation(pairs: NDArray[Any]) -> float | None:
    """Return Spearman's rho of pairs (shape: n, 2); None if one column has a single value."""
    ranks = [_ranks(column) for column in pairs.T]
    if any(len(column) == 0 or column.min() == column.max() for column in ranks):
        return None
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _ranks(values: NDArray[Any]) -> NDArray[Any]:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean_ranks: NDArray[Any] = last - (counts - 1) / 2
    return mean_ranks[places]
