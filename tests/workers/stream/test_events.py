from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from builders import make_body, make_prompt, scored
from plaudit_metrics.sources.stream import EventRecord, decode_event
from plaudit_wire.records import SampleRecord, ScoringRecord, StepRecord, WorkerRecord
from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.stream.calls import StreamLimits
from plaudit_workers.stream.consumer import Consumer, ConsumerOptions, commit, commit_group, publish
from plaudit_workers.stream.groups import read_group
from plaudit_workers.stream.trainer import TrainerStreams
from plaudit_workers.stream.transport import Transport


async def events(transport: Transport) -> list[EventRecord]:
    found = await transport.commands.xrange(transport.names.events)
    return [record for _, fields in found for record in decode_event(fields)]


async def test_the_events_of_a_group_equal_the_trainers_records(run: Any, transport: Transport) -> None:
    await run.scored(n=3, data_source="gsm8k", step=3)
    told = await events(transport)
    assert await transport.commands.xlen(transport.names.events) == 1
    [group] = await run.trainer.take_ready(1, 0.0)
    assert told == [
        SampleRecord(
            group=group.id,
            index=index,
            split="train",
            step=3,
            data_source="gsm8k",
            stamps=sample.stamps,
            scoring=sample.scoring,
            generation=sample.body.generation,
        )
        for index, sample in enumerate(group.samples)
    ]


async def test_events_are_written_when_the_last_score_of_a_group_is_final(run: Any, transport: Transport) -> None:
    first, second = await run.published(n=2)
    await commit(transport, first, scored(1.0))
    assert await events(transport) == []
    await commit(transport, second, scored(2.0))
    assert values(await events(transport)) == [1.0, 2.0]


async def test_with_group_scorers_events_are_written_after_them(run: Any, transport: Transport) -> None:
    await run.start(has_group_scorers=True)
    await run.scored(n=2)
    assert await events(transport) == []
    [delivery] = await run.groups.take(1)
    group = await read_group(transport, delivery.group)
    assert group is not None
    await commit_group(transport, delivery, group, [scored(5.0), scored(6.0)])
    assert values(await events(transport)) == [5.0, 6.0]


async def test_the_events_of_a_large_group_are_written_in_parts(run: Any, transport: Transport) -> None:
    group = await run.admitted(n=600)
    await run.trainer.close(group.group, "dropped", "run_ended")
    assert await transport.commands.xlen(transport.names.events) == 3
    told = await events(transport)
    assert [record.index for record in told if isinstance(record, SampleRecord)] == list(range(600))


def values(records: list[EventRecord]) -> list[float | None]:
    return [record.scoring.value for record in records if isinstance(record, SampleRecord)]


async def test_the_event_of_a_step_is_written_once(run: Any, transport: Transport) -> None:
    record = StepRecord(4, 1, 0.0, 1.0, 8, 1, {"reward/mean": 0.5})
    await run.trainer.record_step(record)
    assert await events(transport) == [record]
    assert await transport.commands.hget(transport.names.state, "step") == b"4"


async def test_processes_that_beat_are_listed_and_silent_ones_are_not(transport: Transport) -> None:
    alive, silent = WorkerRecord("rollout-0", "rollout", slots=4), WorkerRecord("reward-0", "reward")
    await transport.beat(silent)
    await transport.commands.zadd(transport.names.workers, {"reward-0": await transport.now() - 21})
    await transport.beat(alive)
    assert [msgspec.structs.replace(each, reply_s=0.0) for each in await transport.workers()] == [alive]
    await transport.commands.zadd(transport.names.workers, {"reward-0": await transport.now() - 601})
    await transport.beat(alive)
    assert await transport.commands.hkeys(transport.names.worker_records) == [b"rollout-0"]


async def test_events_take_a_tenth_of_the_memory_however_large_they_are(tmp_path: Path, run_name: str) -> None:
    """A reader may be away for long: bounded by their number alone, large records would fill Redis."""
    with RedisServer(tmp_path, max_memory_bytes=32 << 20) as server:
        transport = await Transport.open(RedisAddress(server.url, server.password), run_name)
        trainer = TrainerStreams(transport, StreamLimits(max_open_groups=64))
        await trainer.take_over()
        options = ConsumerOptions(block_s=0.0)
        prompts: Consumer[Any] = Consumer(transport, "prompts", "rollout-0", options)
        samples: Consumer[Any] = Consumer(transport, "samples", "reward-0", options)
        scoring = ScoringRecord("scored", 1.0, worker="reward-0", reason="long " * 12_000)
        for position in range(16 * 12):
            await trainer.admit(make_prompt(f"t-{position}-1.0", n=1))
            [prompt] = await prompts.take(1)
            await publish(transport, prompt, 0, make_body(prompt.payload, 0))
            [delivery] = await samples.take(1)
            await commit(transport, delivery, scoring)
            await trainer.close(prompt.group, "trained")
            prompts.finished(prompt)
            samples.finished(delivery)
        taken = await transport.commands.memory_usage(transport.names.events, samples=0)
        assert 1 << 20 < taken < 5 << 20
        await transport.close()
