"""Run one scorer for a sample, with the job's settings for it, and combine the scorers' results into the reward.

A scorer is called until it answers, within the sample's time budget. ``weightedSum``: reward = Σ weightᵢ · valueᵢ over
the scorers that have a value. A scorer of non-zero weight without a value passes its outcome to the sample, unless its
``onFailure`` is

- ``zero``: this scorer counts as value 0 (the user's explicit choice);
- ``ignore``: it is left out of the sum; if no other scorer has a value, the sample has none;
- ``dropGroup``: as ``mask``, and the whole group is excluded from training.

None is no failure: the scorer says that it does not apply. With ``onNone: mask`` its sample has no reward (outcome
``skipped``), with ``ignore`` it is left out of the sum, as one is that its ``when`` skipped.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import msgspec

from plaudit_reward.isolation.function_scorer import FunctionScorer
from plaudit_reward.scorer import Attempt, GroupScorer, Score, Scorer
from plaudit_wire.backoff import backoff_s
from plaudit_wire.errors import (
    BusyError,
    CallTimeoutError,
    DataError,
    InfrastructureError,
    ScoreTimeoutError,
    ScoringError,
)
from plaudit_wire.logs import get_logger
from plaudit_wire.plain import plain_text
from plaudit_wire.records import Outcome, Sample, ScorerRecord

logger = get_logger(__name__)
T = TypeVar("T")
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 15.0
_RETRIED = (InfrastructureError, CallTimeoutError)


class Allowance(msgspec.Struct, frozen=True):
    """Limit a scorer's work for one sample."""

    budget_s: float
    """Seconds of calls and retries; waiting for limits and for a free process excluded."""
    call_s: float
    """Seconds of one call, waits excluded."""
    retries: int
    """Further attempts after an infrastructure failure."""


class AttemptsResult(msgspec.Struct, Generic[T]):
    """Hold the result of all attempts."""

    result: T | None = None
    """None exactly when it failed."""
    outcome: Outcome = "scored"
    """``scored`` if there is a result, else the kind of failure."""
    reason: str | None = None
    limiter_s: float = 0.0
    """Waiting for rate and concurrency limits, all attempts."""
    held_s: float = 0.0
    """The part of ``limiter_s`` that the endpoint requested."""
    retry_s: float = 0.0
    """Failed attempts and the pauses between attempts."""
    throttled_s: float = 0.0
    """The part of ``retry_s`` that the endpoint caused because it had too many requests."""
    call_s: float = 0.0
    """The last attempt."""
    queued_s: float = 0.0
    """Waiting for a free process, all attempts; in none of the other three."""
    attempts: int = 0

    @property
    def spent_s(self) -> float:
        """Return the seconds that count against the budget."""
        return self.retry_s + self.call_s

    def failure(self) -> Score:
        """Return the score of attempts that failed."""
        return Score.failed(self.outcome, self.reason or "it failed")


async def attempt_until_answered(call: Callable[[Attempt], Awaitable[T]], allowance: Allowance) -> AttemptsResult[T]:
    """Call until there is a result, a failure that a retry cannot fix, or no budget left.

    Only ``InfrastructureError`` and ``CallTimeoutError`` are retried, after a random pause whose mean doubles each
    time, so that many samples do not return to a broken service together. A service's Retry-After is added to the
    pause.
    """
    ended: AttemptsResult[T] = AttemptsResult()
    while True:
        ended.attempts += 1
        attempt = Attempt(min(allowance.call_s, allowance.budget_s - ended.retry_s))
        if attempt.limit_s <= 0:
            ended.outcome, ended.reason = "timeout", "the sample's time was used up before it"
            return ended
        began = time.monotonic()
        ended.result, error = await _once(call, attempt)
        ended.limiter_s += attempt.waited_s
        ended.held_s += attempt.held_s
        ended.queued_s += attempt.queued_s
        ended.call_s = max(0.0, time.monotonic() - began - attempt.waited_s - attempt.queued_s)
        if error is None:
            return ended
        asked_s = error.retry_after_s if isinstance(error, InfrastructureError) else None
        pause_s = (asked_s or 0.0) + backoff_s(ended.attempts, _FIRST_PAUSE_S, _LONGEST_PAUSE_S, jitter=(0.5, 1.5))
        lost_s = ended.call_s + pause_s
        out_of_budget = ended.retry_s + lost_s >= allowance.budget_s
        if not isinstance(error, _RETRIED) or ended.attempts > allowance.retries or out_of_budget:
            ended.outcome, ended.reason = _outcome(error), str(error)
            return ended
        await asyncio.sleep(pause_s)
        ended.retry_s += lost_s
        ended.throttled_s += lost_s if isinstance(error, BusyError) else 0.0


async def _once(call: Callable[[Attempt], Awaitable[T]], attempt: Attempt) -> tuple[T | None, ScoringError | None]:
    try:
        return await call(attempt), None
    except ScoringError as error:
        return None, error
    except Exception as error:  # the boundary to scorers: any other exception is a data error of that sample
        logger.exception("scorer raised")
        return None, DataError(f"{type(error).__name__}: {error}")


def _outcome(error: ScoringError) -> Outcome:
    if isinstance(error, ScoreTimeoutError):
        return "timeout"
    return "infra_error" if isinstance(error, InfrastructureError) else "data_error"


FailurePolicy = Literal["mask", "zero", "dropGroup", "ignore"]
NonePolicy = Literal["mask", "ignore"]


class ScorerPart(msgspec.Struct, frozen=True):
    """Hold one scorer's part in a sample's reward."""

    name: str
    weight: float
    on_failure: FailurePolicy
    record: ScorerRecord
    on_none: NonePolicy = "mask"

    @property
    def decides(self) -> bool:
        """Return True if it has no value, and the sample has none for it."""
        if self.record.is_scored or self.held_back:
            return False
        return self.on_failure not in {"ignore", "zero"} if self.record.has_failed else self.on_none == "mask"

    @property
    def held_back(self) -> bool:
        """Return True if its ``when`` skipped it: there was no attempt."""
        return self.record.attempts == 0


class Combined(msgspec.Struct, frozen=True):
    """Hold the combined result."""

    score: Score
    drop_group: bool = False


def weighted_sum(parts: Sequence[ScorerPart], *, provisional: bool = False) -> Combined:
    """Return the reward of one sample.

    ``provisional``: group-scope scorers follow, so a sample without a failure counts as scored until they have run
    (and has no value if they never run).
    """
    counted = [part for part in parts if part.weight != 0]
    failed = first_failure(counted)
    if failed is not None:
        return failed
    values = [part.weight * value for part in counted if (value := counted_value(part)) is not None]
    return Combined(Score.scored(sum(values, 0.0))) if values or provisional else _nothing(counted or parts)


def first_failure(parts: Sequence[ScorerPart]) -> Combined | None:
    """Return the outcome that one of the scorers decides: failures before skips, in the job's order."""
    deciding = [part for part in parts if part.decides]
    for part in sorted(deciding, key=lambda part: not part.record.has_failed):
        drops = part.record.has_failed and part.on_failure == "dropGroup"
        return Combined(Score.failed(part.record.outcome, f"{part.name}: {part.record.reason}"), drops)
    return None


def values_of(parts: Sequence[ScorerPart]) -> dict[str, float | None]:
    """Return the scorers' values by name, for a combining function; a failure that counts as zero is 0."""
    return {part.name: counted_value(part) for part in parts}


def counted_value(part: ScorerPart) -> float | None:
    """Return the part's value; 0 for a failure with policy ``zero``; None if it does not count."""
    return 0.0 if part.record.has_failed and part.on_failure == "zero" else part.record.value


def _nothing(parts: Sequence[ScorerPart]) -> Combined:
    """Return the sample's outcome when no scorer with a weight has a value: that of the first of them."""
    if not parts:
        return Combined(Score.failed("skipped", "no scorer applies to this sample"))
    failures = [part for part in parts if part.record.has_failed] or list(parts)
    record = failures[0].record
    outcome = "skipped" if record.outcome == "scored" else record.outcome
    return Combined(Score.failed(outcome, f"{failures[0].name}: {record.reason or 'it has weight 0'}"))


class Combiner(Protocol):
    """Compute a sample's reward from its scorers' values."""

    async def combine(self, sample: Sample, parts: Sequence[ScorerPart], *, provisional: bool) -> Combined:
        """Return the sample's reward; ``provisional`` as in ``weighted_sum``."""

    async def close(self) -> None:
        """Stop processes; called once."""


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
    The function has scope ``combine`` and is opened.
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


@dataclass(frozen=True)
class When:
    """Select samples to which an earlier scorer gave this value."""

    scorer: str
    equals: float


@dataclass(frozen=True)
class Rules:
    """Hold the job's settings for one scorer: weight, retries, limits, ``when``, ``onFailure``, ``onNone``."""

    weight: float = 1.0
    retries: int = 2
    timeout_s: float | None = None
    """Seconds of one call; None = the rest of the sample's budget."""
    on_failure: FailurePolicy = "mask"
    on_none: NonePolicy = "mask"
    when: When | None = None

    def allowance(self, budget_s: float) -> Allowance:
        """Return its limits when the sample has ``budget_s`` left."""
        return Allowance(budget_s, math.inf if self.timeout_s is None else self.timeout_s, self.retries)

    def part(self, name: str, record: ScorerRecord) -> ScorerPart:
        """Return its part in a sample's reward."""
        return ScorerPart(name, self.weight, self.on_failure, record, self.on_none)


@dataclass(frozen=True)
class Stage:
    """Hold a scorer with sample scope and its rules."""

    scorer: Scorer
    rules: Rules = Rules()


@dataclass(frozen=True)
class GroupStage:
    """Hold a scorer with group scope and its rules."""

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
        reason=None if score.reason is None else plain_text(score.reason),  # it may quote what an endpoint sent
        limiter_s=ended.limiter_s,
        held_s=ended.held_s,
        retry_s=ended.retry_s,
        throttled_s=ended.throttled_s,
        call_s=ended.call_s,
        wait_s=ended.queued_s,
        attempts=ended.attempts,
        extra=score.extra,
    )
