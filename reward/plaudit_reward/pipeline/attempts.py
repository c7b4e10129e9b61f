"""Call a scorer until it answers: attempts, the pauses between them, and the sample's time budget."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from plaudit_reward.score import Score
from plaudit_reward.scorer import Attempt
from plaudit_wire.errors import CallTimeoutError, DataError, InfrastructureError, ScoreTimeoutError, ScoringError
from plaudit_wire.logs import get_logger
from plaudit_wire.records import Outcome

logger = get_logger(__name__)

T = TypeVar("T")

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 15.0
_RETRIED = (InfrastructureError, CallTimeoutError)


@dataclass(frozen=True)
class Allowance:
    """The limits of a scorer for one sample."""

    budget_s: float
    """Seconds of calls and retries; waiting for limits and for a free process excluded."""
    call_s: float
    """Seconds of one call, waits excluded."""
    retries: int
    """Further attempts after an infrastructure failure."""


@dataclass(frozen=True)
class AttemptsResult(Generic[T]):
    """The result of all attempts."""

    result: T | None
    """None exactly when it failed."""
    outcome: Outcome
    """``scored`` if there is a result, else the kind of failure."""
    reason: str | None
    limiter_s: float
    """Waiting for rate and concurrency limits, all attempts."""
    held_s: float
    """The part of ``limiter_s`` that the endpoint requested."""
    retry_s: float
    """Failed attempts and the pauses between attempts."""
    call_s: float
    """The last attempt."""
    queued_s: float
    """Waiting for a free process, all attempts; in none of the other three."""
    attempts: int

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
    limiter_s = held_s = retry_s = queued_s = 0.0
    for number in range(1, allowance.retries + 2):
        attempt = Attempt(min(allowance.call_s, allowance.budget_s - retry_s))
        if attempt.limit_s <= 0:
            return AttemptsResult(
                None, "timeout", "the sample's time was used up before it", 0.0, 0.0, 0.0, 0.0, 0.0, number
            )
        began = time.monotonic()
        result, error = await _once(call, attempt)
        limiter_s, queued_s = limiter_s + attempt.waited_s, queued_s + attempt.queued_s
        held_s += attempt.held_s
        call_s = max(0.0, time.monotonic() - began - attempt.waited_s - attempt.queued_s)
        if error is None:
            return AttemptsResult(result, "scored", None, limiter_s, held_s, retry_s, call_s, queued_s, number)
        pause_s = _pause_s(number, error)
        out_of_budget = retry_s + call_s + pause_s >= allowance.budget_s
        if not isinstance(error, _RETRIED) or number > allowance.retries or out_of_budget:
            return AttemptsResult(
                None, _outcome(error), str(error), limiter_s, held_s, retry_s, call_s, queued_s, number
            )
        await asyncio.sleep(pause_s)
        retry_s += call_s + pause_s
    raise AssertionError("the last attempt returns")


async def _once(call: Callable[[Attempt], Awaitable[T]], attempt: Attempt) -> tuple[T | None, ScoringError | None]:
    try:
        return await call(attempt), None
    except ScoringError as error:
        return None, error
    except Exception as error:  # the boundary to scorers: any other exception is a data error of that sample
        logger.exception("scorer raised")
        return None, DataError(f"{type(error).__name__}: {error}")


def _pause_s(number: int, error: ScoringError) -> float:
    mean_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (number - 1))
    asked_s = error.retry_after_s if isinstance(error, InfrastructureError) else None
    return (asked_s or 0.0) + random.uniform(0.5, 1.5) * mean_s


def _outcome(error: ScoringError) -> Outcome:
    if isinstance(error, ScoreTimeoutError):
        return "timeout"
    return "infra_error" if isinstance(error, InfrastructureError) else "data_error"
