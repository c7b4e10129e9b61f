"""Hundreds of calls of every kind at once, some given up by their callers: every other one gets its own result."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from plaudit_reward.scorer import Attempt
from plaudit_wire.errors import InfrastructureError, ScoreTimeoutError
from plaudit_wire.records import Sample
from reward_samples import make_sample

Open = Callable[..., Any]

SOURCE = """
import asyncio, os, random, time
def compute_score(sample):
    kind, number = sample.response.split()
    if kind == "hang":
        while True: pass
    if kind == "exit":
        os._exit(1)
    if kind == "raise":
        raise ValueError(number)
    if kind == "slow":
        time.sleep(random.random() * 0.03)
    return float(number)

async def compute_async(sample):
    kind, number = sample.response.split()
    if kind == "hang":
        await asyncio.sleep(1000)
    if kind == "slow":
        await asyncio.sleep(random.random() * 0.03)
    if kind == "raise":
        raise ValueError(number)
    return float(number)
"""


async def result(scorer: Any, sample: Sample) -> Any:
    try:
        score = await scorer.score(sample, Attempt(2.0))
    except (ScoreTimeoutError, InfrastructureError) as error:
        return type(error)
    return score.value if score.value is not None else score.reason


def expected(kind: str, number: int) -> Any:
    if kind == "hang":
        return ScoreTimeoutError
    return "raised" if kind == "raise" else float(number)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("function", "kinds"),
    [("compute_score", ["hang", "exit", "raise", "raise"]), ("compute_async", ["hang", "hang", "raise", "raise"])],
)
async def test_every_call_gets_its_own_result(open_scorer: Open, function: str, kinds: list[str], seed: int) -> None:
    choose = random.Random(seed)
    scorer = await open_scorer(SOURCE, function)
    plan = [choose.choice(["fast"] * 30 + ["slow"] * 10) for _ in range(300)]
    for kind in kinds:
        plan[choose.randrange(300)] = kind
    tasks = [asyncio.create_task(result(scorer, make_sample(f"{kind} {i}", i))) for i, kind in enumerate(plan)]
    for _ in range(20):
        await asyncio.sleep(choose.random() * 0.01)
        tasks[choose.randrange(300)].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for i, (kind, got) in enumerate(zip(plan, results, strict=True)):
        if isinstance(got, asyncio.CancelledError):
            continue
        if kind == "exit":
            assert issubclass(got, InfrastructureError)
        elif kind == "raise":
            assert got.startswith(f"ValueError: {i}")
        else:
            assert got == expected(kind, i), (i, kind)
