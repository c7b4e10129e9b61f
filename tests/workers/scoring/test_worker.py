"""take → score → commit against a real Redis and real child processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plaudit_workers.stream.connection import Transport

Make = Callable[..., Any]


async def test_samples_are_scored_and_their_groups_become_ready(
    make_reward: Make, make_feed: Make, run_worker: Make
) -> None:
    reward = make_reward([{"name": "correct", "kind": "rule"}])
    feed = make_feed(reward)
    ids = await feed.publish([["#### 4", "#### 5"], ["four", "#### 4"]])
    async with run_worker(reward):
        groups = await feed.ready(2)
    values = [[sample.scoring.value for sample in groups[group].samples] for group in ids]
    assert values == [[1.0, 0.0], [0.0, 1.0]]
    assert all(sample.scoring.worker == "reward-0" for group in groups.values() for sample in group.samples)


async def test_failures_reach_the_group_as_their_own_outcome_and_never_as_a_number(
    make_reward: Make, make_feed: Make, run_worker: Make
) -> None:
    source = """
import os, time
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "raise":
        raise ValueError("no such answer")
    if solution_str == "none":
        return None
    if solution_str == "nan":
        return float("nan")
    if solution_str == "hang":
        while True:
            pass
    if solution_str == "exit":
        os._exit(3)
    return 1.0
"""
    reward = make_reward([{"name": "mine", "function": "compute_score", "timeoutSeconds": 0.5, "retries": 1}], source)
    feed = make_feed(reward)
    await feed.publish([["good", "raise", "none", "nan", "hang", "exit", "good"]])
    async with run_worker(reward):
        (group,) = (await feed.ready(1)).values()
    assert [sample.scoring.outcome for sample in group.samples] == [
        "scored",
        "data_error",
        "skipped",
        "data_error",
        "timeout",
        "infra_error",
        "scored",
    ]
    assert [sample.scoring.value for sample in group.samples] == [1.0, None, None, None, None, None, 1.0]
    assert "no such answer" in group.samples[1].scoring.reason


async def test_group_scorers_follow_when_all_samples_are_scored(
    make_reward: Make, make_feed: Make, run_worker: Make
) -> None:
    source = """
def rank(prompts, completions, **columns):
    return [float(len(completion)) for completion in completions]
"""
    reward = make_reward(
        [{"name": "correct", "kind": "rule"}, {"name": "rank", "function": "rank", "scope": "group", "weight": 0.5}],
        source,
    )
    feed = make_feed(reward)
    await feed.publish([["#### 4", "#### 55"]])
    async with run_worker(reward):
        (group,) = (await feed.ready(1)).values()
    assert [sample.scoring.value for sample in group.samples] == [1.0 + 0.5 * 6, 0.0 + 0.5 * 7]
    assert set(group.samples[0].scoring.scorers) == {"correct", "rank"}


async def test_the_worker_tells_that_it_lives(make_reward: Make, run_worker: Make, transport: Transport) -> None:
    reward = make_reward([{"name": "correct", "kind": "rule"}])
    async with run_worker(reward, max_concurrent_samples=7) as worker:
        records: list[Any] = []
        while not records or not worker.ready:
            records = await transport.workers()
    (record,) = records
    assert (record.worker, record.role, record.slots, record.busy) == ("reward-0", "reward", 7, 0)
