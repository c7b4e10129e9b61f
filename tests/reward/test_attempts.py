"""Attempts: what is tried again, what is not, and where the seconds go."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from plaudit_reward import attempts
from plaudit_reward.attempts import Allowance, attempt_until_answered
from plaudit_reward.scorer import Attempt
from plaudit_wire.errors import BusyError, DataError, InfrastructureError, ScoreTimeoutError, WorkerKilledError

GENEROUS = Allowance(budget_s=60.0, call_s=math.inf, retries=2)


def failing(
    *errors: Exception | None,
    takes_s: float = 0.0,
    waits_s: float = 0.0,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Callable[[Attempt], Awaitable[float]]:
    """Raises these one call after the other; None: returns the number of the call."""
    calls = iter(enumerate(errors, 1))

    async def call(attempt: Attempt) -> float:
        number, error = next(calls)
        await sleep(takes_s + waits_s)
        attempt.waited_s += waits_s
        if error is not None:
            raise error
        return float(number)

    return call


@pytest.fixture
def quick_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "_FIRST_PAUSE_S", 0.01)


@pytest.mark.usefixtures("quick_pauses")
async def test_infrastructure_failures_are_tried_again() -> None:
    ended = await attempt_until_answered(
        failing(InfrastructureError("away"), WorkerKilledError("died"), None), GENEROUS
    )
    assert (ended.result, ended.outcome, ended.attempts) == (3.0, "scored", 3)
    assert ended.retry_s > 0


@pytest.mark.usefixtures("quick_pauses")
async def test_after_the_last_retry_the_failure_stands() -> None:
    ended = await attempt_until_answered(failing(*[InfrastructureError("away")] * 3), GENEROUS)
    assert (ended.result, ended.outcome, ended.reason, ended.attempts) == (None, "infra_error", "away", 3)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(DataError("bad"), "data_error"), (ScoreTimeoutError("slow"), "timeout"), (KeyError("bug"), "data_error")],
)
async def test_other_failures_are_final(error: Exception, outcome: str) -> None:
    ended = await attempt_until_answered(failing(error, None), GENEROUS)
    assert (ended.outcome, ended.attempts) == (outcome, 1)


async def test_no_attempt_is_made_that_the_budget_cannot_pay() -> None:
    allowance = Allowance(budget_s=0.1, call_s=math.inf, retries=9)
    ended = await attempt_until_answered(failing(InfrastructureError("away"), None), allowance)
    assert (ended.outcome, ended.attempts) == ("infra_error", 1)


async def test_a_used_up_budget_is_a_timeout() -> None:
    ended = await attempt_until_answered(failing(None), Allowance(0.0, math.inf, 2))
    assert (ended.result, ended.outcome) == (None, "timeout")


async def test_the_limit_of_a_call_is_the_smaller_of_its_own_and_the_remaining_time() -> None:
    limits: list[float] = []

    async def call(attempt: Attempt) -> float:
        limits.append(attempt.limit_s)
        return 1.0

    await attempt_until_answered(call, Allowance(10.0, 3.0, 0))
    await attempt_until_answered(call, Allowance(10.0, math.inf, 0))
    assert limits == [3.0, 10.0]


@pytest.mark.usefixtures("quick_pauses")
async def test_waits_retries_and_the_call_are_timed_apart(clock: Any) -> None:
    call = failing(InfrastructureError(""), None, takes_s=0.05, waits_s=0.1, sleep=clock.sleep)
    ended = await attempt_until_answered(call, GENEROUS)
    assert ended.limiter_s == pytest.approx(0.2)
    assert ended.call_s == pytest.approx(0.05)
    assert ended.retry_s >= 0.05
    assert ended.limiter_s + ended.retry_s + ended.call_s == pytest.approx(clock.now_s)


@pytest.mark.usefixtures("quick_pauses")
async def test_the_time_of_refused_requests_is_told_from_that_of_failures(clock: Any) -> None:
    refused = await attempt_until_answered(failing(BusyError(""), None, takes_s=0.05, sleep=clock.sleep), GENEROUS)
    assert refused.throttled_s == refused.retry_s > 0
    failed = await attempt_until_answered(
        failing(InfrastructureError(""), None, takes_s=0.05, sleep=clock.sleep), GENEROUS
    )
    assert failed.retry_s > failed.throttled_s == 0


async def test_queueing_for_a_process_is_timed_apart_from_the_call_and_not_part_of_the_budget(clock: Any) -> None:
    async def call(attempt: Attempt) -> float:
        await clock.sleep(0.2)
        attempt.queued_s += 0.2
        return 1.0

    ended = await attempt_until_answered(call, Allowance(budget_s=0.1, call_s=math.inf, retries=0))
    assert (ended.result, ended.limiter_s) == (1.0, 0.0)
    assert (ended.call_s, ended.queued_s) == (pytest.approx(0.0), pytest.approx(0.2))
    assert ended.spent_s == pytest.approx(0.0)
