"""What the real stream protocol writes is what the metrics read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from redis.asyncio import Redis

from builders import make_body, make_prompt
from plaudit_metrics.service.series.run import RunSeries
from plaudit_metrics.service.view import RunView
from plaudit_metrics.sources.snapshot import take_snapshot
from plaudit_metrics.sources.steps import KeptSteps
from plaudit_metrics.sources.stream import EventReader
from plaudit_wire.messages import Announcement, PolicyVersion, Prompt
from plaudit_wire.names import Names
from plaudit_wire.records import (
    GroupRecord,
    Sample,
    SampleRecord,
    ScorerRecord,
    ScoringRecord,
    StepRecord,
    WorkerRecord,
)
from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.stream.calls import Admission, StreamLimits
from plaudit_workers.stream.consumer import Consumer, ConsumerOptions, commit, publish
from plaudit_workers.stream.groups import Group
from plaudit_workers.stream.trainer import TrainerStreams
from plaudit_workers.stream.transport import Transport

SCORING = ScoringRecord(
    "scored", 0.5, scorers={"rule": ScorerRecord("scored", 0.5, call_s=0.01)}, call_s=0.01, worker="reward-0"
)


@pytest.fixture
async def client(redis_server: RedisServer) -> AsyncIterator[Redis]:
    client = Redis.from_url(redis_server.url, password=redis_server.password, protocol=2)
    yield client
    await client.aclose()


async def carry(transport: Transport, trainer: TrainerStreams, prompt: Prompt) -> Group:
    """One group from admission to ready."""
    options = ConsumerOptions(block_s=0.05)
    assert await trainer.admit(prompt) is Admission.admitted
    async with Consumer[Prompt](transport, "prompts", "rollout-0", options) as prompts:
        (delivery,) = await prompts.take(1)
        await asyncio.sleep(0.05)
        for index in range(prompt.n):
            await publish(transport, delivery, index, make_body(prompt, index))
        prompts.finished(delivery)
    async with Consumer[Sample](transport, "samples", "reward-0", options) as samples:
        for sample in await samples.take(prompt.n):
            await asyncio.sleep(0.02)
            await commit(transport, sample, SCORING)
            samples.finished(sample)
    (group,) = await trainer.take_ready(1, 8.0)
    return group


async def test_a_step_that_went_through_the_streams_is_known_to_the_last_stamp(
    transport: Transport, client: Redis, run_name: str
) -> None:
    trainer = TrainerStreams(transport, StreamLimits(max_open_groups=4))
    incarnation = await trainer.take_over()
    opened = await transport.now()
    group = await carry(transport, trainer, make_prompt("t-0-1.0", 3))
    record = GroupRecord(
        group.id, "train", 1, "trained", 3, 3, group.admitted, await transport.now(), group.terminal, group.ready
    )
    await trainer.close(group.id, "trained", record=record)
    step = StepRecord(1, incarnation, opened, await transport.now(), 3, 1, {"reward/mean": 0.5}, verdict="reward")
    await trainer.record_step(step)

    view, stop = RunView(RunSeries(), KeptSteps()), asyncio.Event()
    reading = asyncio.create_task(EventReader(client, Names(run_name), view.handle).run(stop))
    async with asyncio.timeout(10):
        while len(view.kept) == 0:
            await asyncio.sleep(0.01)
    stop.set()
    await reading

    closed = view.kept.get(1)
    assert closed is not None
    assert closed.records_missing == 0
    assert {sample.index for sample in closed.slowest} == {0, 1, 2}
    for sample in closed.slowest:
        assert sample.scoring == SCORING
        assert sample.generation == make_body(make_prompt("t-0-1.0", 3), 0).generation
        assert sample.data_source == "copy"
        check_stamps(sample, group)
    assert view.series.registry.get_sample_value("plaudit_samples_total", {"outcome": "scored"}) == 3
    assert view.series.registry.get_sample_value("plaudit_groups_total", {"outcome": "trained"}) == 1


def check_stamps(sample: SampleRecord, group: Group) -> None:
    assert msgspec.structs.asdict(sample.stamps) == pytest.approx(
        msgspec.structs.asdict(group.samples[sample.index].stamps), abs=1e-6
    )
    stamps = sample.stamps
    assert stamps.taken is not None
    assert stamps.published is not None
    assert stamps.score_taken is not None
    assert stamps.committed is not None
    assert stamps.admitted <= stamps.taken <= stamps.published <= stamps.score_taken <= stamps.committed


async def test_stream_contents_and_live_workers_are_shown(transport: Transport, client: Redis, run_name: str) -> None:
    trainer = TrainerStreams(transport, StreamLimits(max_open_groups=4))
    incarnation = await trainer.take_over()
    await trainer.announce(Announcement(PolicyVersion(incarnation, 7), "/weights/1.7", "abc"))
    for number in range(3):
        await trainer.admit(make_prompt(f"t-{number}-1.0", 2))
    await transport.beat(WorkerRecord("rollout-0", "rollout", slots=4, busy=1, version=f"{incarnation}.5"))
    await transport.beat(WorkerRecord("reward-0", "reward", ready=False))

    async with Consumer[Prompt](transport, "prompts", "rollout-0", ConsumerOptions(block_s=0.05)) as prompts:
        await prompts.take(1)
        seen = await take_snapshot(client, Names(run_name))
    assert seen.streams["prompts"].undelivered == 2
    assert seen.streams["prompts"].in_flight == 1
    assert 0 <= seen.streams["prompts"].oldest_undelivered_s < 30
    assert seen.streams["samples"].undelivered == 0
    assert seen.workers == {("rollout", "busy"): 1, ("reward", "starting"): 1}
    assert (seen.policy_version, seen.policy_version_lag) == (7, 2)


async def test_the_judge_figures_of_reward_workers_are_shown(
    transport: Transport, client: Redis, run_name: str
) -> None:
    keys = Names(run_name)
    await client.hincrby(keys.judges, "big:200", 40)
    await client.hincrby(keys.judges, "big:429", 2)
    await transport.beat(WorkerRecord("reward-0", "reward", circuits_open=["strict"]))
    seen = await take_snapshot(client, keys)
    assert seen.judge_requests == {("big", "200"): 40, ("big", "429"): 2}
    assert seen.circuits_open == {"big": False, "strict": True}


async def test_work_done_twice_is_counted_by_stream(transport: Transport, client: Redis, run_name: str) -> None:
    trainer = TrainerStreams(transport, StreamLimits(max_open_groups=4))
    await trainer.take_over()
    prompt = make_prompt("t-0-1.0", 2)
    await trainer.admit(prompt)
    async with Consumer[Prompt](transport, "prompts", "rollout-0", ConsumerOptions(block_s=0.05)) as prompts:
        (delivery,) = await prompts.take(1)
        await publish(transport, delivery, 0, make_body(prompt, 0))
        await publish(transport, delivery, 0, make_body(prompt, 0))
    assert (await take_snapshot(client, Names(run_name))).duplicates == {"prompts": 1}
