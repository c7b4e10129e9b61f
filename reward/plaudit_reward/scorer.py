"""Define the protocols of scorers, and the limits of one attempt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from plaudit_reward.score import Score
from plaudit_wire.sample import Sample


@dataclass
class Attempt:
    """One call of a scorer: the pipeline sets the limit, the scorer records how long it waited before it started."""

    limit_s: float
    """Seconds of work (both kinds of waiting excluded) after which the scorer must raise ``ScoreTimeoutError``."""
    waited_s: float = 0.0
    """Seconds spent waiting for a rate or concurrency limit; the scorer adds to it."""
    held_s: float = 0.0
    """The part of ``waited_s`` that the endpoint requested; the scorer adds to it."""
    queued_s: float = 0.0
    """Seconds spent waiting for a free process; the scorer adds to it. Part of the stage ``score``, not ``limiter``."""


class Scorer(Protocol):
    """Score one sample at a time (``scope: sample``).

    ``score`` raises ``InfrastructureError`` where a retry may help, ``ScoreTimeoutError`` and ``DataError`` where not;
    any other exception is a ``data_error`` of that sample.
    """

    name: str

    async def open(self) -> None:
        """Start processes and connections; called once, before any score. ``close`` follows even if this raises.

        Raises:
            ConfigurationError: it cannot work as configured.
        """
        ...

    async def score(self, sample: Sample, attempt: Attempt) -> Score:
        """Score one sample."""
        ...

    def room(self) -> int:
        """Return how many more samples it could start soon."""
        ...

    async def close(self) -> None:
        """Stop processes and connections; called once."""
        ...


class GroupScorer(Protocol):
    """Score all samples of a group together (``scope: group``), in the given order."""

    name: str

    async def open(self) -> None:
        """Start processes and connections; see ``Scorer.open``."""
        ...

    async def score_group(self, samples: Sequence[Sample], values: Sequence[float], attempt: Attempt) -> list[Score]:
        """Return one score for each of the group's samples that have a value so far (``values``), in the same order."""
        ...

    def room(self) -> int:
        """Return how many more groups it could start soon."""
        ...

    async def close(self) -> None:
        """Stop processes and connections; called once."""
        ...
