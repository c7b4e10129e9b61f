from __future__ import annotations

import asyncio
from typing import Any

import pytest

from builders import make_body, scored
from plaudit_metrics.sources.stream import decode_event
from plaudit_wire.records import GroupRecord, SampleRecord
from plaudit_workers.stream.calls import Commitment
from plaudit_workers.stream.consumer import commit, publish
from plaudit_workers.stream.transport import Transport


async def test_past_its_deadline_a_group_goes_on_with_the_samples_it_has(run: Any, transport: Transport) -> None:
    await run.start(group_deadline_s=0.0)
    prompt = await run.admitted(n=3)
    for index in (0, 1):
        await publish(transport, prompt, index, make_body(prompt.payload, index))
    first, late = await run.samples.take(2)
    await commit(transport, first, scored(1.0))
    assert await run.trainer.release_expired() == [prompt.group]
    assert await run.trainer.release_expired() == []
    [group] = await run.trainer.take_ready(1, 0.0)
    assert group.phase == "ready"
    assert [sample.scoring.outcome for sample in group.samples] == ["scored", "given_up", "given_up"]
    assert await commit(transport, late, scored(1.0)) is Commitment.duplicate
    for stream in (transport.names.prompts, transport.names.samples):
        assert await transport.commands.xlen(stream) == 0


async def test_a_released_group_with_too_few_scores_is_dropped(run: Any, transport: Transport) -> None:
    await run.start(group_deadline_s=0.0)
    prompt = await run.admitted(n=2)
    await publish(transport, prompt, 0, make_body(prompt.payload, 0))
    await run.trainer.release_expired()
    [group] = await run.trainer.take_ready(1, 0.0)
    assert (group.phase, group.reason) == ("dropped", "too_few_scored")


async def test_group_scorers_past_their_deadline_leave_no_half_of_a_score(run: Any, transport: Transport) -> None:
    await run.start(has_group_scorers=True, group_scoring_deadline_s=0.0)
    await run.scored(n=2)
    assert len(await run.trainer.release_expired()) == 1
    [group] = await run.trainer.take_ready(1, 0.0)
    assert {sample.scoring.outcome for sample in group.samples} == {"timeout"}
    assert {sample.scoring.value for sample in group.samples} == {None}


async def test_a_group_is_closed_once(run: Any) -> None:
    group = await run.scored()
    with pytest.raises(ValueError, match="'dropped' needs a reason"):
        await run.trainer.close(group, "dropped")
    [taken] = await run.trainer.take_ready(1, 0.0)
    assert await run.trainer.close(taken.id, "trained")
    assert not await run.trainer.close(taken.id, "trained")
    counters = await run.trainer.counters()
    assert (counters["trained"], counters["open:train"]) == (1, 0)


async def test_closing_an_open_group_ends_its_claimed_samples(run: Any, transport: Transport) -> None:
    prompt = await run.admitted(n=2)
    await publish(transport, prompt, 0, make_body(prompt.payload, 0))
    [sample] = await run.samples.take(1)
    record = GroupRecord(prompt.group, "train", 1, "dropped", 2, 0, 0.0, 1.0, reason="run_ended")
    await run.trainer.close(prompt.group, "dropped", "run_ended", record)
    await run.samples.renew()
    assert sample.lost.is_set()
    assert await commit(transport, sample, scored(1.0)) is Commitment.refused
    left = [key async for key in transport.commands.scan_iter(transport.names.group("*"))]
    assert left == []
    events = await transport.commands.xrange(transport.names.events)
    assert [type(told) for _, fields in events for told in decode_event(fields)] == [
        SampleRecord,
        SampleRecord,
        GroupRecord,
    ]


async def test_ready_groups_of_a_trainer_that_died_are_handed_to_the_next(run: Any) -> None:
    group = await run.scored()
    assert [taken.id for taken in await run.trainer.take_ready(4, 0.0)] == [group]
    assert await run.trainer.take_ready(4, 0.0) == []
    others = [await run.scored(group=f"t-{i}-1.0", position=i, n=1) for i in (1, 2, 3)]
    await run.start()
    assert [taken.id for taken in await run.trainer.take_ready(2, 0.0)] == [group, others[0]]
    assert await run.trainer.missing([group]) == []  # looks at what is held once more
    assert [taken.id for taken in await run.trainer.take_ready(1, 0.0)] == [others[1]]
    await run.trainer.close(others[1], "trained")
    assert [taken.id for taken in await run.trainer.take_ready(2, 0.0)] == [others[2]]
    assert list(run.trainer.taken) == [group, others[0], others[2]]


async def test_waiting_for_a_ready_group_ends_when_one_is(run: Any, transport: Transport) -> None:
    deliveries = await run.published(n=1)
    waiting = asyncio.create_task(run.trainer.take_ready(4, 9.0))
    await asyncio.sleep(0.02)
    await commit(transport, deliveries[0], scored(1.0))
    [group] = await asyncio.wait_for(waiting, 7.0)
    assert group.ready <= group.taken
