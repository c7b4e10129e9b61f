"""take → score → commit against a real Redis and real child processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from plaudit_reward.attempts import Stage
from plaudit_reward.pipeline import Pipeline
from plaudit_reward.scorer import Score
from plaudit_wire.records import Sample
from plaudit_workers.service.worker import ScoringOptions, ScoringWorker
from plaudit_workers.stream.consumer import Consumer, ConsumerOptions
from plaudit_workers.stream.transport import Transport
from scripted_scorer import ScriptedScorer

Make = Callable[..., Any]

FAILS_BY_RESPONSE = """
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
    if solution_str.startswith("sleep"):
        time.sleep(float(solution_str.split()[1]))
    return 1.0
"""


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


@pytest.mark.long
async def test_failures_reach_the_group_as_their_own_outcome_and_never_as_a_number(
    make_reward: Make, make_feed: Make, run_worker: Make
) -> None:
    scorer = {"name": "mine", "function": "compute_score", "timeoutSeconds": 2, "retries": 1}
    reward = make_reward([scorer], FAILS_BY_RESPONSE)
    feed = make_feed(reward)
    await feed.publish([["good", "raise", "none", "nan", "hang", "exit", "good"]])
    async with run_worker(reward):
        (group,) = (await feed.ready(1)).values()
    assert [(sample.scoring.outcome, sample.scoring.value) for sample in group.samples] == [
        ("scored", 1.0),
        ("data_error", None),
        ("skipped", None),
        ("data_error", None),
        ("timeout", None),
        ("infra_error", None),
        ("scored", 1.0),
    ]
    assert "no such answer" in group.samples[1].scoring.reason


async def test_a_failure_can_drop_its_group(make_reward: Make, make_feed: Make, run_worker: Make) -> None:
    scorer = {"name": "mine", "function": "compute_score", "onFailure": "dropGroup"}
    reward = make_reward([scorer], FAILS_BY_RESPONSE)
    feed = make_feed(reward)
    ids = await feed.publish([["good", "raise", "good"], ["good", "good", "good"]])
    async with run_worker(reward):
        groups = await feed.ready(2)
    assert [groups[group].phase for group in ids] == ["dropped", "ready"]


async def test_group_scorers_follow_when_all_samples_are_scored(
    make_reward: Make, make_feed: Make, run_worker: Make
) -> None:
    source = """
def rank(prompts, completions, **columns):
    return [float(len(completion)) for completion in completions]
"""
    rank = {"name": "rank", "function": "rank", "scope": "group", "weight": 0.5}
    reward = make_reward([{"name": "correct", "kind": "rule"}, rank], source)
    feed = make_feed(reward)
    await feed.publish([["#### 4", "#### 55"]])
    async with run_worker(reward):
        (group,) = (await feed.ready(1)).values()
    assert [sample.scoring.value for sample in group.samples] == [1.0 + 0.5 * 6, 0.0 + 0.5 * 7]
    assert set(group.samples[0].scoring.scorers) == {"correct", "rank"}


async def test_a_class_with_post_process_scores_sees_its_groups(
    make_reward: Make, make_feed: Make, run_worker: Make
) -> None:
    source = """
class Agent:
    def compute_score(self, data_source, solution_str, ground_truth, extra_info=None):
        return float(solution_str), solution_str, "because"
    def post_process_scores(self, rewards):
        return [reward - min(rewards) for reward in rewards]
"""
    reward = make_reward([{"name": "agent", "function": "Agent"}], source)
    feed = make_feed(reward)
    await feed.publish([["2", "5"]])
    async with run_worker(reward):
        (group,) = (await feed.ready(1)).values()
    assert [sample.scoring.value for sample in group.samples] == [0.0, 3.0]


async def test_the_worker_tells_that_it_lives(make_reward: Make, run_worker: Make, transport: Transport) -> None:
    reward = make_reward([{"name": "correct", "kind": "rule"}])
    async with run_worker(reward, max_concurrent_samples=7) as worker:
        records: list[Any] = []
        while not records or not worker.ready:
            records = await transport.workers()
            await asyncio.sleep(0.01)
    (record,) = records
    assert (record.worker, record.role, record.slots, record.busy) == ("reward-0", "reward", 7, 0)


async def test_a_stopped_worker_finishes_samples_that_end_soon_and_releases_the_rest(
    make_reward: Make, make_feed: Make, run_worker: Make, transport: Transport
) -> None:
    scorer = {"name": "mine", "function": "compute_score", "isolation": "thread"}
    reward = make_reward([scorer], FAILS_BY_RESPONSE)
    feed = make_feed(reward)
    ids = await feed.publish([["sleep 0.4"], ["sleep 1000"]])
    async with run_worker(reward, drain_grace_s=3.0) as worker:
        while worker.busy < 2:
            await asyncio.sleep(0.01)
    (group,) = (await feed.ready(1)).values()
    assert (group.id, group.samples[0].scoring.outcome) == (ids[0], "scored")
    async with Consumer[Sample](transport, "samples", "reward-1", ConsumerOptions(block_s=0.05)) as consumer:
        (delivery,) = await consumer.reclaim(10, lease_s=20.0)
        assert (delivery.group, delivery.deliveries) == (ids[1], 1)


async def test_work_whose_lease_went_to_another_is_dropped(
    make_reward: Make, make_feed: Make, run_worker: Make, transport: Transport
) -> None:
    scorer = {"name": "mine", "function": "compute_score", "isolation": "thread"}
    reward = make_reward([scorer], FAILS_BY_RESPONSE)
    feed = make_feed(reward)
    (group_id,) = await feed.publish([["sleep 1000"]])
    quick = ConsumerOptions(block_s=0.05, renew_every_s=0.2)
    async with run_worker(reward, consumer=quick) as worker:
        while worker.busy < 1:
            await asyncio.sleep(0.01)
        async with Consumer[Sample](transport, "samples", "reward-1", ConsumerOptions(block_s=0.05)) as thief:
            assert len(await thief.reclaim(1, lease_s=0)) == 1
            async with asyncio.timeout(10):
                while worker.busy:
                    await asyncio.sleep(0.05)
            group = await feed.trainer.read(group_id)
            assert group.samples[0].scoring is None


async def test_two_workers_share_the_samples_and_score_each_once(
    make_reward: Make, make_feed: Make, run_worker: Make
) -> None:
    scorer = {"name": "mine", "function": "compute_score", "isolation": "process"}
    reward = make_reward([scorer], FAILS_BY_RESPONSE)
    feed = make_feed(reward)
    async with run_worker(reward, "reward-0"), run_worker(reward, "reward-1"):
        await feed.publish([["sleep 0.02"] * 4] * 30)
        groups = await feed.ready(30)
    workers = [sample.scoring.worker for group in groups.values() for sample in group.samples]
    assert set(workers) == {"reward-0", "reward-1"}
    counters = await feed.trainer.counters()
    assert counters["duplicates"] == 0


async def test_a_burst_is_scored_whole(make_reward: Make, make_feed: Make, run_worker: Make) -> None:
    reward = make_reward([{"name": "mine", "function": "compute_score"}], FAILS_BY_RESPONSE)
    feed = make_feed(reward)
    await feed.publish([["good", "raise", "none", "good"]] * 100)
    async with run_worker(reward, max_concurrent_samples=64):
        groups = await feed.ready(100)
    outcomes = {tuple(sample.scoring.outcome for sample in group.samples) for group in groups.values()}
    assert outcomes == {("scored", "data_error", "skipped", "scored")}


async def test_a_score_that_cannot_be_stored_ends_its_sample_and_no_other(
    make_reward: Make, make_feed: Make, transport: Transport
) -> None:
    reward = make_reward([{"name": "correct", "kind": "rule"}])
    feed = make_feed(reward)
    await feed.publish([["lone", "right"]])
    huge = Score("scored", 1.0, extra={"tokens": 2**70})
    half = ScriptedScorer("half", lambda each: huge if each.response == "lone" else 1.0)
    options = ScoringOptions(consumer=ConsumerOptions(block_s=0.05))
    worker = ScoringWorker("reward-0", transport, Pipeline([Stage(half)]), options)
    stop = asyncio.Event()
    running = asyncio.create_task(worker.run(stop))
    (group,) = (await feed.ready(1)).values()
    stop.set()
    await running
    assert [sample.scoring.outcome for sample in group.samples] == ["data_error", "scored"]
    assert group.samples[0].scoring.reason.startswith("its result cannot be stored")
