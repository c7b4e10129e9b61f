"""Define scorers: their protocols, the limits of one attempt, and the result for one sample."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import msgspec

from plaudit_wire.records import Outcome, Sample


class Score(msgspec.Struct, frozen=True, omit_defaults=True):
    """Hold a typed result: a value exists only with outcome ``scored``, so a failure can never look like a zero."""

    outcome: Outcome
    value: float | None = None
    reason: str | None = None
    extra: dict[str, float | str] = {}

    def __post_init__(self) -> None:
        if (self.value is not None) != (self.outcome == "scored"):
            raise ValueError(f"a score has a value exactly when its outcome is 'scored', not {self!r}")

    @classmethod
    def scored(cls, value: float, **extra: float | str) -> Self:
        """Return a score with a value; NaN and infinities become a ``data_error``."""
        if not math.isfinite(value):
            return cls("data_error", reason=f"the value {value} is not finite", extra=extra)
        return cls("scored", float(value), extra=extra)

    @classmethod
    def failed(cls, outcome: Outcome, reason: str) -> Self:
        """Return a score without a value."""
        return cls(outcome, reason=reason)


@dataclass
class Attempt:
    """Hold one call of a scorer: the pipeline sets the limit, the scorer records how long it waited before."""

    limit_s: float
    """Seconds of work (both kinds of waiting excluded) after which the scorer must raise ``ScoreTimeoutError``."""
    waited_s: float = 0.0
    """Seconds spent waiting for a rate or concurrency limit; the scorer adds to it."""
    held_s: float = 0.0
    """The part of ``waited_s`` that the endpoint requested; the scorer adds to it."""
    queued_s: float = 0.0
    """Seconds spent waiting for a free process; the scorer adds to it. Part of the stage ``score``, not ``limiter``."""
    began_s: float = field(default_factory=time.monotonic)
    """When it began (monotonic)."""
    _waits_since_s: float | None = None
    """When its present wait for a limit began; None while it works."""

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in the context as a wait for a limit."""
        self._waits_since_s = time.monotonic()
        try:
            yield
        finally:
            self.waited_s += time.monotonic() - self._waits_since_s
            self._waits_since_s = None

    @property
    def waits(self) -> bool:
        """Return True while it waits for a limit."""
        return self._waits_since_s is not None

    @property
    def age_s(self) -> float:
        """Return the seconds since it began, without the waits for limits."""
        return (self._waits_since_s or time.monotonic()) - self.began_s - self.waited_s


class _AnyScorer(Protocol):
    name: str

    async def open(self) -> None:
        """Start processes and connections; called once, before any score. ``close`` follows even if this raises.

        Raises ``ConfigurationError`` if it cannot work as configured.
        """

    def room(self) -> int:
        """Return how many more samples, or groups, it could start soon."""

    async def close(self) -> None:
        """Stop processes and connections; called once."""


class Scorer(_AnyScorer, Protocol):
    """Score one sample at a time (``scope: sample``).

    ``score`` raises ``InfrastructureError`` where a retry may help, ``ScoreTimeoutError`` and ``DataError`` where not;
    any other exception is a ``data_error`` of that sample.
    """

    async def score(self, sample: Sample, attempt: Attempt) -> Score:
        """Score one sample."""


class GroupScorer(_AnyScorer, Protocol):
    """Score all samples of a group together (``scope: group``), in the given order."""

    async def score_group(self, samples: Sequence[Sample], values: Sequence[float], attempt: Attempt) -> list[Score]:
        """Return one score for each of the group's samples that have a value so far (``values``), in the same order."""


ALWAYS_ROOM = 1_000_000
"""The room of a scorer that never waits."""


class InlineScorer:
    """Call a function that only processes the sample, in the pipeline's process."""

    def __init__(self, name: str, function: Callable[[Sample], float | Score]) -> None:
        self.name = name
        self._function = function

    async def open(self) -> None:
        """Do nothing."""

    async def score(self, sample: Sample, attempt: Attempt) -> Score:
        """Score the sample at once."""
        result = self._function(sample)
        return result if isinstance(result, Score) else Score.scored(result)

    def room(self) -> int:
        """Return a large number: it never waits."""
        return ALWAYS_ROOM

    async def close(self) -> None:
        """Do nothing."""


def agent_reward(sample: Sample) -> Score:
    """Return the reward that a sample's tools or environment gave it; without one it is ``skipped``, never zero."""
    reward = sample.agent_reward
    if reward is None:
        return Score.failed("skipped", "neither the tools nor the environment gave a reward")
    if reward.outcome != "scored" or reward.value is None:
        return Score.failed(reward.outcome, reward.reason or "")
    return Score.scored(reward.value)
