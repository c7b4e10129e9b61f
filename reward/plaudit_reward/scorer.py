"""What a scorer is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from plaudit_reward.sample import Sample
from plaudit_reward.score import Score


class Scorer(Protocol):
    """Scores one sample at a time (``scope: sample``).

    ``score`` raises ``InfrastructureError`` when another attempt may help, ``ScoreTimeout`` and ``DataError`` when
    not; whatever else escapes it is a ``data_error`` of that sample.
    """

    name: str

    async def score(self, sample: Sample) -> Score:
        """Scores one sample."""
        ...

    async def close(self) -> None:
        """Ends processes and connections; called once."""
        ...


class GroupScorer(Protocol):
    """Scores all samples of a group together (``scope: group``), in the order given."""

    name: str

    async def score_group(self, samples: Sequence[Sample]) -> list[Score]:
        """One score a sample, same order."""
        ...

    async def close(self) -> None:
        """Ends processes and connections; called once."""
        ...
