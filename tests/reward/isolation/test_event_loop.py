"""isolation: inline. Async functions share one loop; what does not await is named and ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from plaudit_reward.isolation import pool
from plaudit_reward.scorer import Attempt
from plaudit_wire.errors import ConfigurationError, ScoreTimeoutError
from plaudit_wire.records import Sample
from reward_samples import make_sample

Open = Callable[..., Any]

AWAITS = """
import asyncio, time
async def compute_score(solution_str, ground_truth):
    if solution_str == "hang":
        await asyncio.sleep(1000)
    if solution_str == "stubborn":
        while True:
            try: await asyncio.sleep(1000)
            except asyncio.CancelledError: pass
    if solution_str == "block":
        await asyncio.sleep(0.01)
        time.sleep(1000)
    if solution_str == "spin":
        while True: pass
    if solution_str == "callback":
        asyncio.get_running_loop().call_later(0.01, time.sleep, 1000)
        return 0.0
    if solution_str == "cancelled":
        raise asyncio.CancelledError
    await asyncio.sleep(float(solution_str))
    return float(solution_str)
"""


async def result(scorer: Any, sample: Sample, limit_s: float) -> Any:
    try:
        score = await scorer.score(sample, Attempt(limit_s))
    except ScoreTimeoutError as error:
        return str(error)
    return score.value if score.value is not None else score.outcome


async def test_calls_share_one_loop(open_scorer: Open) -> None:
    source = """
    import asyncio
    waiting = 0
    async def compute_score(sample):
        global waiting
        waiting += 1
        while waiting < 300: await asyncio.sleep(0.01)
        return 1
    """
    scorer = await open_scorer(source, max_concurrent=300)
    results = await asyncio.gather(*(result(scorer, make_sample(), 30.0) for _ in range(300)))
    assert results == [1.0] * 300


@pytest.mark.parametrize("blamed", ["hang", "stubborn", "block", pytest.param("spin", marks=pytest.mark.long)])
async def test_only_the_sample_to_blame_times_out(open_scorer: Open, blamed: str) -> None:
    scorer = await open_scorer(AWAITS, max_concurrent=100)
    responses = ["0.05"] * 20 + ["0.5"] * 20 + [blamed] + ["0.05"] * 20
    results = await asyncio.gather(*(result(scorer, make_sample(text), 1.2) for text in responses))
    answer = results.pop(40)
    assert results == [0.05] * 20 + [0.5] * 20 + [0.05] * 20
    assert answer.startswith("timeout") or "no result within 1.2 s" in answer


@pytest.mark.parametrize("begun", [True, False])
async def test_a_callback_that_blocks_the_loop_for_good_costs_no_sample(
    open_scorer: Open, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    monkeypatch.setattr(pool, "_BEGIN_WITHIN_S", 0.5)
    scorer = await open_scorer(AWAITS)
    late = [] if begun else [asyncio.sleep(0.2)]
    responses = ["callback", *["0.3"] * 20 * begun]
    results = await asyncio.gather(*(result(scorer, make_sample(text), 1.2) for text in responses), *late)
    results += await asyncio.gather(*(result(scorer, make_sample("0.05"), 1.2) for _ in range(20)))
    assert [each for each in results if each is not None] == [0.0, *[0.3] * 20 * begun, *[0.05] * 20]


async def test_a_function_that_blocks_the_loop_is_named(open_scorer: Open, caplog: pytest.LogCaptureFixture) -> None:
    scorer = await open_scorer(AWAITS)
    with caplog.at_level(logging.WARNING):
        answer = await result(scorer, make_sample("block"), 0.8)
    assert "blocks the event loop in compute_score (" in answer
    line = 1 + AWAITS.splitlines().index("        time.sleep(1000)")
    assert f"rewards.py:{line})" in answer
    (record,) = [r for r in caplog.records if r.message == "async reward function blocks its event loop"]
    assert f"rewards.py:{line}" in record.fields["where"]  # type: ignore[attr-defined]


async def test_a_cancellation_of_its_own_is_the_samples_error(open_scorer: Open) -> None:
    scorer = await open_scorer(AWAITS)
    assert await result(scorer, make_sample("cancelled"), 5.0) == "data_error"


async def test_async_clients_are_made_inside_the_loop(open_scorer: Open) -> None:
    source = """
    import asyncio
    class Agent:
        def __init__(self): self.loop = asyncio.get_running_loop()
        async def compute_score(self, data_source, solution_str, ground_truth, extra_info=None):
            return float(asyncio.get_running_loop() is self.loop)
        def post_process_scores(self, rewards): return [r + 1 for r in rewards]
    """
    for isolation in (None, "process"):
        scorer = await open_scorer(source, "Agent", isolation=isolation)
        assert await result(scorer, make_sample(), 5.0) == 1.0
        assert [s.value for s in await scorer.post_process([1.0, 2.0], Attempt(5.0))] == [2.0, 3.0]


async def test_threads_are_no_place_for_async_functions(open_scorer: Open) -> None:
    with pytest.raises(ConfigurationError, match="is async, and isolation: thread is for functions that block"):
        await open_scorer(AWAITS, isolation="thread")


async def test_an_async_function_can_have_a_process_to_itself(open_scorer: Open) -> None:
    scorer = await open_scorer(AWAITS, isolation="process")
    results = await asyncio.gather(*(result(scorer, make_sample(text), 0.5) for text in ("spin", "0.01", "0.02")))
    assert results[1:] == [0.01, 0.02]
    assert "no result within 0.5 s" in results[0]
