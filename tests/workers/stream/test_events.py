from __future__ import annotations

from typing import Any

import msgspec

from plaudit_metrics.records import GenerationRecord, ScoringRecord, StepRecord, WorkerRecord
from plaudit_workers.stream.commits import commit_group, read_group
from plaudit_workers.stream.connection import Transport


async def events(transport: Transport) -> list[dict[str, bytes]]:
    found = await transport.commands.xrange(transport.names.events)
    return [{name.decode(): value for name, value in fields.items()} for _, fields in found]


async def test_a_terminal_sample_is_told_with_its_stamps(run: Any, make: Any, transport: Transport) -> None:
    await run.scored(n=1, data_source="gsm8k", step=3)
    [group] = await run.trainer.take_ready(1, 0.0)
    [event] = await events(transport)
    told = {name: event[name] for name in ("kind", "group", "index", "split", "step", "data_source", "deliveries")}
    assert told == {
        "kind": b"sample",
        "group": group.id.encode(),
        "index": b"0",
        "split": b"train",
        "step": b"3",
        "data_source": b"gsm8k",
        "deliveries": b"1",
    }
    stamps = group.samples[0].stamps
    assert float(event["admitted"]) == stamps.admitted
    for name in ("taken", "published", "score_taken", "committed"):
        assert float(event[name]) == getattr(stamps, name)
    assert "score_first_taken" not in event
    assert msgspec.msgpack.decode(event["scoring"], type=ScoringRecord) == make.score(1.0)
    generation = msgspec.msgpack.decode(event["generation"], type=GenerationRecord)
    assert generation == group.samples[0].body.generation


async def test_with_group_scorers_a_sample_is_told_when_its_score_is_final(
    run: Any, make: Any, transport: Transport
) -> None:
    await run.start(has_group_scorers=True)
    await run.scored(n=2)
    assert await events(transport) == []
    [delivery] = await run.groups.take(1)
    group = await read_group(transport, delivery.group)
    assert group is not None
    await commit_group(transport, delivery, group, [make.score(5.0), make.score(6.0)])
    values = [msgspec.msgpack.decode(event["scoring"], type=ScoringRecord).value for event in await events(transport)]
    assert values == [5.0, 6.0]


async def test_a_step_is_told_once(run: Any, transport: Transport) -> None:
    record = StepRecord(4, 1, 0.0, 1.0, 8, 1, {"reward/mean": 0.5})
    await run.trainer.record_step(record)
    [event] = await events(transport)
    assert msgspec.msgpack.decode(event["record"], type=StepRecord) == record
    assert await transport.commands.hget(transport.names.state, "step") == b"4"


async def test_processes_that_beat_are_listed_and_silent_ones_are_not(transport: Transport) -> None:
    alive, silent = WorkerRecord("rollout-0", "rollout", slots=4), WorkerRecord("reward-0", "reward")
    await transport.beat(silent)
    await transport.commands.zadd(transport.names.workers, {"reward-0": await transport.now() - 21})
    await transport.beat(alive)
    assert await transport.workers() == [alive]
    await transport.commands.zadd(transport.names.workers, {"reward-0": await transport.now() - 601})
    await transport.beat(alive)
    assert await transport.commands.hkeys(transport.names.worker_records) == [b"rollout-0"]
