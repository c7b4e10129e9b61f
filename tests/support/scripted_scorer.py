"""A scorer with scripted answers, for tests and load generation; never a default."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from plaudit_reward.scorer import Attempt, Score
from plaudit_wire.errors import ScoringError
from plaudit_wire.records import Sample

ScriptedAnswer = float | Score | ScoringError


class ScriptedScorer:
    """Return, or raise, the ``answer`` for each sample; supports sample and group scope.

    Args:
        name: of the scorer.
        answer: a number, a score, or an error to raise.
        takes_s: duration of the call, by sample.
        waits_s: seconds that it waits, and reports, for a limiter before the call.
    """

    def __init__(
        self,
        name: str,
        answer: Callable[[Sample], ScriptedAnswer],
        takes_s: Callable[[Sample], float] = lambda sample: 0.0,
        waits_s: float = 0.0,
    ) -> None:
        self.name = name
        self._answer = answer
        self._takes_s = takes_s
        self._waits_s = waits_s
        self.num_calls = 0

    async def open(self) -> None:
        """Start nothing."""

    async def score(self, sample: Sample, attempt: Attempt) -> Score:
        """Answer for one sample."""
        self.num_calls += 1
        await self._pass_time(self._takes_s(sample), attempt)
        return _score(self._answer(sample))

    async def score_group(self, samples: Sequence[Sample], values: Sequence[float], attempt: Attempt) -> list[Score]:
        """Answer for each sample of a group."""
        self.num_calls += 1
        await self._pass_time(max((self._takes_s(sample) for sample in samples), default=0.0), attempt)
        return [_score(self._answer(sample)) for sample in samples]

    def room(self) -> int:
        """Return a large number: it never waits for a place."""
        return 1_000_000

    async def close(self) -> None:
        """Stop nothing."""

    async def _pass_time(self, seconds: float, attempt: Attempt) -> None:
        if self._waits_s:
            await asyncio.sleep(self._waits_s)
            attempt.waited_s += self._waits_s
        if seconds:
            await asyncio.sleep(seconds)


def _score(answer: ScriptedAnswer) -> Score:
    if isinstance(answer, ScoringError):
        raise answer
    return answer if isinstance(answer, Score) else Score.scored(answer)
