"""Compute a sample's reward from its scorers' values: by the weighted sum, or by a user's function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from plaudit_reward.isolation.function_scorer import FunctionScorer
from plaudit_reward.pipeline.attempts import Allowance, AttemptsResult, attempt_until_answered
from plaudit_reward.pipeline.combine import Combined, ScorerPart, first_failure, values_of, weighted_sum
from plaudit_reward.score import Score
from plaudit_wire.sample import Sample


class Combiner(Protocol):
    """Combine the parts of one sample."""

    async def combine(self, sample: Sample, parts: Sequence[ScorerPart], *, provisional: bool) -> Combined:
        """Return the sample's reward; ``provisional`` as in ``combine.weighted_sum``."""
        ...

    async def close(self) -> None:
        """Stop processes; called once."""
        ...


class WeightedSum:
    """Add weighted values: ``combine: {kind: weightedSum}``."""

    async def combine(self, sample: Sample, parts: Sequence[ScorerPart], *, provisional: bool) -> Combined:
        """Return the sum of weight times value."""
        return weighted_sum(parts, provisional=provisional)

    async def close(self) -> None:
        """Do nothing."""


class FunctionCombiner:
    """Call a function of the scorers' values by name: ``combine: {kind: python}``.

    A failed scorer of non-zero weight decides the sample's outcome before the function is called, as for the sum.

    Args:
        function: of scope ``combine``, opened.
    """

    def __init__(self, function: FunctionScorer, *, timeout_s: float, retries: int = 2) -> None:
        self._function = function
        self._allowance = Allowance(timeout_s, timeout_s, retries)

    async def combine(self, sample: Sample, parts: Sequence[ScorerPart], *, provisional: bool) -> Combined:
        """Call the function; while group-scope scorers are due, use the weighted sum instead."""
        failure = first_failure([part for part in parts if part.weight != 0])
        if failure is not None:
            return failure
        if provisional:
            return weighted_sum(parts, provisional=True)
        values = values_of(parts)
        ended: AttemptsResult[Score] = await attempt_until_answered(
            lambda attempt: self._function.combine(values, sample, attempt), self._allowance
        )
        return Combined(ended.result if ended.result is not None else ended.failure())

    async def close(self) -> None:
        """Stop the function's processes."""
        await self._function.close()
