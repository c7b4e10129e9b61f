"""isolation: thread. Hundreds of calls that block; one that hangs has its child replaced, neighbours finish."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from plaudit_reward.scorer import Attempt
from plaudit_wire.errors import InfrastructureError, ScoreTimeoutError
from plaudit_wire.records import Sample
from reward_samples import make_sample

Open = Callable[..., Any]

BLOCKS = """
import os, time
def compute_score(solution_str, ground_truth):
    if solution_str == "hang":
        time.sleep(1000)
    if solution_str == "spin":
        while True: pass
    if solution_str == "exit":
        time.sleep(0.05); os._exit(1)
    time.sleep(float(solution_str))
    return float(solution_str)
"""


async def result(scorer: Any, sample: Sample, limit_s: float) -> Any:
    try:
        return (await scorer.score(sample, Attempt(limit_s))).value
    except (ScoreTimeoutError, InfrastructureError) as error:
        return type(error)


async def test_calls_run_at_the_same_time(open_scorer: Open) -> None:
    source = """
    import threading
    at_once = threading.Barrier(50)
    def compute_score(sample):
        at_once.wait(20)
        return 1
    """
    scorer = await open_scorer(source, isolation="thread", processes=1, max_concurrent=50)
    results = await asyncio.gather(*(result(scorer, make_sample(), 20.0) for _ in range(100)))
    assert results == [1.0] * 100


async def test_a_hung_thread_costs_its_own_sample_only(open_scorer: Open) -> None:
    scorer = await open_scorer(BLOCKS, isolation="thread", max_concurrent=40)
    responses = ["0.3"] * 30 + ["hang"] * 3 + ["0.01"] * 60
    results = await asyncio.gather(*(result(scorer, make_sample(text), 1.0) for text in responses))
    assert results == [0.3] * 30 + [ScoreTimeoutError] * 3 + [0.01] * 60


async def test_a_spinning_thread_does_not_make_its_neighbours_time_out(open_scorer: Open) -> None:
    source = """
    import threading
    spinning = threading.Event()
    def compute_score(solution_str, ground_truth):
        if solution_str == "spin":
            spinning.set()
            while True: pass
        for _ in range(300): spinning.wait(0.0001)
        return 1.0
    """
    scorer = await open_scorer(source, isolation="thread", processes=1, max_concurrent=8)
    responses = ["spin"] * 2 + ["work"] * 5
    results = await asyncio.gather(*(result(scorer, make_sample(text), 1.0) for text in responses))
    assert results == [ScoreTimeoutError] * 2 + [1.0] * 5


async def test_when_a_child_dies_its_other_calls_run_again(open_scorer: Open) -> None:
    scorer = await open_scorer(BLOCKS, isolation="thread", processes=1, max_concurrent=20)
    responses = ["0.2"] * 10 + ["exit"] + ["0.01"] * 10
    results = await asyncio.gather(*(result(scorer, make_sample(text), 5.0) for text in responses))
    # The one that ends its child does so twice; who ran beside it both times cannot be told from it.
    assert results[11:] == [0.01] * 10
    assert issubclass(results[10], InfrastructureError)
