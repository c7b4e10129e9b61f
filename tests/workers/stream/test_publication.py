from __future__ import annotations

from typing import Any

from builders import make_body, make_prompt
from plaudit_workers.stream.calls import Call, Publication
from plaudit_workers.stream.consumer import discard, publish, unpublished
from plaudit_workers.stream.transport import Transport


async def test_the_first_published_index_counts_and_the_second_is_a_duplicate(run: Any) -> None:
    prompt = await run.admitted(n=2)
    first, second = make_body(prompt.payload, 0, tokens=(1,)), make_body(prompt.payload, 0, tokens=(2,))
    assert await publish(run.transport, prompt, 0, first) is Publication.published
    assert await publish(run.transport, prompt, 0, second) is Publication.duplicate
    assert await unpublished(run.transport, prompt.payload) == [1]
    group = await run.trainer.read(prompt.group)
    assert group.samples[0].body == first
    assert group.samples[1].body is None
    assert (await run.trainer.counters())["duplicates:prompts"] == 1


async def test_a_call_that_arrives_twice_repeats_its_answer_and_counts_once(run: Any) -> None:
    prompt = await run.admitted(n=2)
    sent: list[Call[Any]] = []
    inner = run.transport.scripts.answers

    async def twice(calls: list[Call[Any]]) -> list[Any]:
        sent.extend(calls)
        first, second = await inner(calls), await inner(calls)
        assert first == second
        return list(first)

    run.transport.scripts.answers = twice
    for index in (0, 0, 1):
        await publish(run.transport, prompt, index, make_body(prompt.payload, index))
    counters = await run.trainer.counters()
    assert counters["duplicates"] == 1
    assert await run.transport.commands.xlen(run.transport.names.samples) == 2
    await run.trainer.close(prompt.group, "dropped", "run_ended")
    counters = await run.trainer.counters()
    assert (counters["dropped"], counters["open:train"]) == (1, 0)
    assert {call.script for call in sent} == {"publish", "close"}


async def test_the_prompt_ends_with_its_last_sample(run: Any, transport: Transport) -> None:
    prompt = await run.admitted(n=2)
    await publish(transport, prompt, 1, make_body(prompt.payload, 1))
    assert await transport.commands.xlen(transport.names.prompts) == 1
    assert not await discard(transport, prompt)
    await publish(transport, prompt, 0, make_body(prompt.payload, 0))
    assert await transport.commands.xlen(transport.names.prompts) == 0


async def test_a_sample_of_a_group_that_is_gone_is_refused_and_its_prompt_ended(run: Any, transport: Transport) -> None:
    prompt = await run.admitted()
    await run.trainer.close(prompt.group, "dropped", "run_ended")
    assert await unpublished(transport, prompt.payload) == []
    assert await publish(transport, prompt, 0, make_body(prompt.payload, 0)) is Publication.refused
    assert await transport.commands.xlen(transport.names.prompts) == 0


async def test_an_unread_entry_stays_for_its_reader(run: Any, transport: Transport) -> None:
    prompt = make_prompt()
    await run.trainer.admit(prompt)
    await run.trainer.close(prompt.group, "dropped", "run_ended")
    assert await transport.commands.xlen(transport.names.prompts) == 1
    [delivery] = await run.prompts.take(1)
    assert await discard(transport, delivery)
    assert await transport.commands.xlen(transport.names.prompts) == 0


async def test_the_deadline_runs_from_the_first_published_sample(run: Any, transport: Transport) -> None:
    await run.start(group_deadline_s=50.0)
    prompt = await run.admitted()
    assert await transport.commands.zscore(transport.names.open, prompt.group) == float("inf")
    before = await transport.now()
    await publish(transport, prompt, 0, make_body(prompt.payload, 0))
    armed = await transport.commands.zscore(transport.names.open, prompt.group)
    assert armed is not None
    assert before + 50 <= armed <= await transport.now() + 50
    await publish(transport, prompt, 1, make_body(prompt.payload, 1))
    assert await transport.commands.zscore(transport.names.open, prompt.group) == armed


async def test_a_trainer_that_takes_over_gives_every_deadline_anew(run: Any, transport: Transport) -> None:
    await run.start(group_deadline_s=0.0)
    prompt = await run.admitted()
    await publish(transport, prompt, 0, make_body(prompt.payload, 0))
    await transport.commands.hset(transport.names.group(prompt.group), "deadline_s", "100")
    await run.start(group_deadline_s=0.0)
    assert await run.trainer.release_expired() == []
