"""Hold a scorer with the job's settings for it: weight, retries, limits, ``when``, ``onFailure``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from plaudit_reward.pipeline.attempts import Allowance, AttemptsResult
from plaudit_reward.pipeline.combine import FailurePolicy, ScorerPart
from plaudit_reward.score import Score
from plaudit_reward.scorer import GroupScorer, Scorer
from plaudit_wire.records import ScorerRecord


@dataclass(frozen=True)
class When:
    """Select samples to which an earlier scorer gave this value."""

    scorer: str
    equals: float


@dataclass(frozen=True)
class Rules:
    """The job's settings for one scorer."""

    weight: float = 1.0
    retries: int = 2
    timeout_s: float | None = None
    """Seconds of one call; None = the rest of the sample's budget."""
    on_failure: FailurePolicy = "mask"
    when: When | None = None

    def allowance(self, budget_s: float) -> Allowance:
        """Return its limits when the sample has ``budget_s`` left."""
        return Allowance(budget_s, math.inf if self.timeout_s is None else self.timeout_s, self.retries)

    def part(self, name: str, record: ScorerRecord) -> ScorerPart:
        """Return its part in a sample's reward."""
        return ScorerPart(name, self.weight, self.on_failure, record)


@dataclass(frozen=True)
class Stage:
    """A scorer with sample scope and its rules."""

    scorer: Scorer
    rules: Rules = Rules()


@dataclass(frozen=True)
class GroupStage:
    """A scorer with group scope and its rules."""

    scorer: GroupScorer
    rules: Rules = Rules()
    replaces: bool = False
    """Its values replace the samples' instead of being added to them."""
    of: str | None = None
    """It changes only the values of this sample-scope scorer (the ``post_process_scores`` of its class)."""


def record_of(score: Score, ended: AttemptsResult[Any]) -> ScorerRecord:
    """Return the record of a score and its timings."""
    return ScorerRecord(
        outcome=score.outcome,
        value=score.value,
        reason=score.reason,
        limiter_s=ended.limiter_s,
        held_s=ended.held_s,
        retry_s=ended.retry_s,
        call_s=ended.call_s,
        wait_s=ended.queued_s,
        attempts=ended.attempts,
        extra=score.extra,
    )
