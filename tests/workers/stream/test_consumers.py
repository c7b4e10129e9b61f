from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from builders import make_body, make_prompt, scored
from plaudit_wire.redis import RedisAddress
from plaudit_workers.commands.runs import DeadLetters
from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.stream.calls import ClaimRules, Commitment, Publication, StreamLimits, claim
from plaudit_workers.stream.consumer import Consumer, ConsumerOptions, commit, publish
from plaudit_workers.stream.groups import ServerTime
from plaudit_workers.stream.trainer import TrainerStreams
from plaudit_workers.stream.transport import Transport
from stepped_clock import SteppedClock


async def test_a_delivery_that_was_lost_on_the_way_comes_again_and_counts_once(run: Any, transport: Transport) -> None:
    await run.published(n=2)
    same_process = Consumer[Any](transport, "samples", "reward-0", run.another(run.samples, "x")._options)
    again = await same_process.take(8)
    assert [delivery.deliveries for delivery in again] == [1, 1]
    assert await same_process.take(8) == []


async def test_a_living_worker_keeps_its_leases_and_a_dead_one_loses_them(run: Any) -> None:
    quick = {"lease_s": 1.5, "renew_every_s": 0.1}
    living, other = (run.another(run.samples, f"reward-{i}", **quick) for i in (1, 2))
    dead = await run.published(n=4)  # by run.samples, which does not renew
    async with living:
        kept = await living.reclaim(2, lease_s=0.0)
        taken: list[Any] = []
        while len(taken) < 2:
            taken += await other.take(8)
            await asyncio.sleep(0.02)
        assert {d.entry_id for d in taken} == {d.entry_id for d in dead} - {d.entry_id for d in kept}
        assert not any(delivery.lost.is_set() for delivery in kept)


async def test_a_worker_that_wakes_after_its_lease_learns_which_samples_it_lost(run: Any) -> None:
    frozen = await run.published(n=2)
    taken = await run.another(run.samples, "reward-1").reclaim(1, lease_s=0.0)
    await run.samples.renew()
    assert [delivery.lost.is_set() for delivery in frozen] == [d.entry_id == taken[0].entry_id for d in frozen]


async def test_an_entry_that_a_worker_lost_and_still_works_on_is_not_delivered_to_it_again(run: Any) -> None:
    await run.published(n=1)
    other = run.another(run.samples, "reward-1")
    await other.reclaim(1, lease_s=0.0)
    assert await run.samples.reclaim(1, lease_s=0.0) == []
    await run.samples.renew()
    [again] = await run.samples.reclaim(1, lease_s=0.0) + await run.samples.take(1)
    assert again.deliveries == 3


async def test_work_that_was_handed_back_is_taken_at_once_and_counts_as_new(run: Any) -> None:
    deliveries = await run.published(n=2)
    await run.samples.hand_back(deliveries)
    next_worker = run.another(run.samples, "reward-1", renew_every_s=0.0)
    again = await next_worker.take(8)
    assert [delivery.deliveries for delivery in again] == [1, 1]
    assert [delivery.new for delivery in (*deliveries, *again)] == [True, True, False, False]
    assert "redelivered:samples" not in await run.trainer.counters()


async def test_a_worker_that_leaves_hands_everything_back_and_is_forgotten(run: Any, transport: Transport) -> None:
    worker = run.another(run.samples, "reward-1")
    async with worker:
        await run.published(n=2)
        assert len(await worker.reclaim(8, lease_s=0.0)) == 2
    names = [c["name"] for c in await transport.commands.xinfo_consumers(transport.names.samples, "reward")]
    assert b"reward-1" in names  # what it handed back is still pending under its name
    [first, second] = await run.another(run.samples, "reward-2", renew_every_s=0.0).take(8)
    async with worker:
        pass
    names = [c["name"] for c in await transport.commands.xinfo_consumers(transport.names.samples, "reward")]
    assert b"reward-1" not in names
    assert {first.deliveries, second.deliveries} == {2}


async def test_an_entry_that_three_workers_were_lost_with_is_buried(run: Any, transport: Transport) -> None:
    [_, innocent] = await run.published(n=2)
    await commit(transport, innocent, scored(1.0))
    [again] = await run.another(run.samples, "reward-1").reclaim(8, lease_s=0.0)
    assert again.deliveries == 2
    third = run.another(run.samples, "reward-2")
    assert await third.reclaim(8, lease_s=0.0) == []
    [alone] = await third.take(8)
    assert alone.deliveries == 3
    assert await run.another(run.samples, "reward-3").reclaim(8, lease_s=0.0) == []
    [group] = await run.trainer.take_ready(1, 0.0)
    assert [sample.scoring.outcome for sample in group.samples] == ["poison", "scored"]
    [(_, letter)] = await transport.commands.xrange(transport.names.dead)
    assert (letter[b"stream"], letter[b"deliveries"]) == (b"samples", b"4")
    assert [loss.split(b"@")[0] for loss in letter[b"history"].split()] == [b"reward-0", b"reward-1", b"reward-2"]
    assert b"3 workers were lost" in letter[b"reason"]
    counters = await run.trainer.counters()
    assert (counters["poison"], counters["dead:samples"], counters["redelivered:samples"]) == (1, 1, 3)


async def test_suspects_are_worked_on_without_other_entries(run: Any) -> None:
    await run.published(n=3)
    await run.another(run.samples, "reward-1").reclaim(8, lease_s=0.0)
    worker = run.another(run.samples, "reward-2")
    assert await worker.reclaim(8, lease_s=0.0) == []  # all three are its own now, and wait
    suspects = await worker.take(8)
    assert [suspect.deliveries for suspect in suspects] == [3, 3, 3]
    await publish_one(run, "t-1-1.0")
    assert await worker.take(8) == []  # nothing beside them
    for suspect in suspects:
        worker.finished(suspect)
    again = await worker.take(8)
    assert [delivery.deliveries for delivery in again] == [3, 3, 3]  # not ended by a transition: they come again
    for suspect in again:
        await commit(run.transport, suspect, scored(1.0))
        worker.finished(suspect)
    assert [delivery.group for delivery in await worker.take(8)] == ["t-1-1.0"]


async def test_repeated_mass_kills_bury_only_the_entry_that_caused_them(run: Any) -> None:
    """A worker works on 16 suspects at once, after each further loss on a quarter: 2 + 3 losses find one of 24."""
    killer = (await run.published(n=24))[7].index
    losses, num_scored, options = 1, 0, {"renew_every_s": 0.0, "suspect_from": 3, "most_suspects": 16}
    batches: list[int] = []
    for number in range(1, 40):
        worker = run.another(run.samples, f"reward-{number}", **options)
        taken = await worker.reclaim(64, lease_s=0.0) or await worker.take(64)
        batches.append(len(taken))
        if killer in {delivery.index for delivery in taken}:
            losses += 1  # it dies with all of them
            continue
        for delivery in taken:
            await commit(run.transport, delivery, scored(1.0))
            worker.finished(delivery)
            num_scored += 1
        if not taken:
            break
    assert (losses, num_scored) == (5, 23)
    assert batches[:2] == [24, 16]
    [group] = await run.trainer.take_ready(1, 0.0)
    assert [sample.index for sample in group.samples if sample.scoring.outcome == "poison"] == [killer]


async def publish_one(run: Any, group: str) -> None:
    prompt = await run.admitted(group=group, n=1)
    await publish(run.transport, prompt, 0, make_body(prompt.payload, 0))


async def test_a_poisoned_prompt_ends_every_sample_that_was_not_published(run: Any) -> None:
    prompt = await run.admitted(n=3)
    await publish(run.transport, prompt, 1, make_body(prompt.payload, 1))
    for name in ("rollout-1", "rollout-2", "rollout-3"):
        worker = run.another(run.prompts, name)
        await worker.reclaim(8, lease_s=0.0)
        await worker.take(1)
    group = await run.trainer.read(prompt.group)
    outcomes = [sample.scoring.outcome if sample.scoring else None for sample in group.samples]
    assert outcomes == ["poison", None, "poison"]
    [delivery] = await run.samples.take(1)
    await commit(run.transport, delivery, scored(1.0))
    [ready] = await run.trainer.take_ready(1, 0.0)
    assert ready.phase == "ready"


async def test_a_poisoned_group_loses_its_scores_but_not_its_samples(run: Any) -> None:
    await run.start(has_group_scorers=True)
    await run.scored(n=2)
    await run.groups.take(1)
    for name in ("reward-1", "reward-2", "reward-3"):
        worker = run.another(run.groups, name)
        await worker.reclaim(8, lease_s=0.0)
        await worker.take(1)
    [group] = await run.trainer.take_ready(1, 0.0)
    assert {sample.scoring.outcome for sample in group.samples} == {"infra_error"}
    assert all(sample.body for sample in group.samples)


async def test_an_entry_of_another_schema_version_goes_to_a_worker_of_that_version(
    run: Any, transport: Transport
) -> None:
    """In a mixed deployment it is no poison: it is handed back, uncounted, and this worker does not take it again."""
    await run.trainer.admit(make_prompt())
    [(entry, fields)] = await transport.commands.xrange(transport.names.prompts)
    other = {**fields, b"record": b"\x63" + fields[b"record"][1:]}
    await transport.commands.xadd(transport.names.prompts, other)
    await transport.commands.xdel(transport.names.prompts, entry)
    for _ in range(5):
        assert await run.prompts.take(1) == []
    assert await transport.commands.xlen(transport.names.dead) == 0
    rules = ClaimRules(lease_s=1.0, suspect_from=3)
    _, [(taken, deliveries, _)] = await transport.reads.run(claim("prompts", "newer", 1, rules, None, []))
    assert deliveries == 1
    assert await transport.commands.xrange(transport.names.prompts, taken, taken)


MALFORMED: list[dict[str, Any]] = [
    {"x": "y"},
    {"sample": "", "record": b"x"},
    {"sample": "t-0-1.0 zero digest", "record": b"x"},
    {"sample": b"\xff\xfe 0 digest"},
    {"sample": "t-0-1.0 0 digest"},
    {"sample": "t-0-1.0 0 digest", "record": b""},
    {"sample": "t-0-1.0 0 digest", "record": b"\x01garbage"},
    {"sample": "t-0-1.0 0 digest", "record": b"\x00garbage"},
    {"sample": "t-0-1.0 99 digest", "record": b"\x01\x80"},
    {"sample": "t-9-1.0 0 digest", "record": b"\x01\x80"},
]


async def test_malformed_entries_become_dead_letters_and_harm_no_sample(run: Any, transport: Transport) -> None:
    """Whoever may write to the stream must not be able to stop its workers, nor to end a sample of others."""
    [first, second] = await run.published(n=2)
    for fields in MALFORMED:
        await transport.commands.xadd(transport.names.samples, fields)
    other = run.another(run.samples, "reward-1")
    assert await other.take(100) == []
    letters = await DeadLetters(transport).list()
    assert len(letters) == len(MALFORMED)
    assert [await DeadLetters(transport).retry(letter) for letter in letters].count("retried") == 0
    for delivery in (first, second):
        assert await commit(transport, delivery, scored(1.0)) is Commitment.committed
    [group] = await run.trainer.take_ready(1, 0.0)
    assert [sample.scoring.outcome for sample in group.samples] == ["scored", "scored"]


async def test_a_malformed_entry_that_a_dead_worker_held_is_taken_over_and_ended(
    run: Any, transport: Transport
) -> None:
    for fields in MALFORMED:
        await transport.commands.xadd(transport.names.samples, fields)
    await transport.commands.xreadgroup("reward", "dead", {transport.names.samples: ">"})
    assert await run.another(run.samples, "reward-1").reclaim(100, lease_s=0.0) == []
    assert await transport.commands.xlen(transport.names.samples) == 0
    assert await transport.commands.xlen(transport.names.dead) == 4  # the others name a group that does not exist


async def test_a_claim_answers_names_and_payloads_are_read_a_few_at_a_time(run: Any, transport: Transport) -> None:
    """All payloads in one answer might not arrive within a timeout: then the same would be asked for for ever."""
    prompt = await run.admitted(n=12)
    for index in range(12):
        body = make_body(prompt.payload, index, text="x" * 100_000)
        assert await publish(transport, prompt, index, body) is Publication.published
    dead = await run.samples.take(12)
    assert len(dead) == 12
    [answer] = await transport.reads.answers([claim("samples", "names", 12, ClaimRules(lease_s=0.0), None, [])])
    assert sum(len(entry) for entry, *_ in answer[1:]) < 1000
    taken = await run.another(run.samples, "names").reclaim(12)
    assert [delivery.payload.response for delivery in taken] == ["x" * 100_000] * 12


async def test_one_look_for_lapsed_leases_serves_all_consumers(run: Any, transport: Transport) -> None:
    """Each looking by itself would cost Redis the square of their number."""
    lease_s = 0.4
    await run.published(n=2)
    await asyncio.sleep(1.2 * lease_s)
    rules = ClaimRules(lease_s=lease_s, look_every_s=60.0, suspect_from=9, poison_limit=9)

    async def looked(name: str, count: int) -> int:
        _, entries = await transport.reads.run(claim("samples", name, count, rules, None, []))
        return len(entries)

    assert await looked("reward-1", 1) == 1  # it found more than it could take: the next one looks too
    assert await looked("reward-2", 8) == 1
    await asyncio.sleep(1.2 * lease_s)
    assert await looked("reward-3", 8) == 0
    await transport.commands.delete(transport.names.leases)
    assert await looked("reward-3", 8) == 2


@pytest.mark.parametrize("step_s", [60.0, -600.0])
async def test_a_step_of_the_servers_clock_moves_no_work_and_stops_no_takeover(
    run: Any, transport: Transport, step_s: float
) -> None:
    await run.published(n=1)
    [(entry, _)] = await transport.commands.xrange(transport.names.samples)
    lease_s = 0.4
    rules = ClaimRules(lease_s=lease_s, suspect_from=3, poison_limit=3)
    stamped_ms = round((await transport.now() - step_s) * 1000)  # as if the clock had been stepped since then
    await transport.commands.xclaim(
        transport.names.samples, "reward", "reward-0", 0, [entry], time=stamped_ms, justid=True
    )

    async def claimed(expected: tuple[float, float, float] | None) -> int:
        _, entries = await transport.reads.run(claim("samples", "reward-1", 8, rules, expected, []))
        return len(entries)

    clock = ServerTime()
    sent = time.monotonic()
    clock.observe(await transport.now() - step_s, sent, time.monotonic())
    assert await claimed(clock.expected(time.monotonic())) == 0
    assert await claimed(None) == 0  # nor does a consumer that knows nothing of the step
    await asyncio.sleep(lease_s + 0.1)
    assert await claimed(None) == 1  # its worker has not renewed it since


async def test_lost_consumer_groups_are_created_again_and_nothing_is_skipped(run: Any, transport: Transport) -> None:
    await transport.commands.delete(transport.names.prompts, transport.names.ready)
    await run.trainer.admit(make_prompt())
    assert await run.prompts.take(1) == []
    assert len(await run.prompts.take(1)) == 1
    assert await run.trainer.take_ready(1, 0.0) == []
    assert (await run.trainer.counters())["groups_recreated"] == 1


async def test_the_number_of_unread_samples_stays_known(run: Any, transport: Transport) -> None:
    """Autoscalers read Redis's lag; an entry deleted unread would make it unknown, which they take for 0."""
    prompt = await run.admitted(n=4)
    for index in range(4):
        await publish(transport, prompt, index, make_body(prompt.payload, index))
    [first] = await run.samples.take(1)
    await commit(transport, first, scored(1.0))
    await run.trainer.close(prompt.group, "dropped", "run_ended")
    [about] = await transport.commands.xinfo_groups(transport.names.samples)
    assert about["lag"] == 3


async def test_a_worker_without_free_slots_takes_nothing(run: Any) -> None:
    await run.trainer.admit(make_prompt())
    assert await run.prompts.take(0) == []
    assert len(await run.prompts.take(1)) == 1


def test_a_worker_name_with_a_space_is_refused(run: Any) -> None:
    with pytest.raises(ValueError, match="without spaces"):
        run.another(run.samples, "reward 1")


@pytest.mark.skipif(not SteppedClock.available(), reason="needs a C compiler")
@pytest.mark.parametrize("step_s", [60.0, -600.0])
async def test_a_server_whose_clock_is_really_stepped_moves_no_work(
    tmp_path: Path, run_name: str, step_s: float
) -> None:
    clock = SteppedClock(tmp_path)
    with clock.preloaded(), RedisServer(tmp_path / "redis") as server:
        transport = await Transport.open(RedisAddress(server.url, server.password), run_name)
        trainer = TrainerStreams(transport, StreamLimits(max_open_groups=4))
        await trainer.take_over()
        await trainer.admit(make_prompt())
        options = ConsumerOptions(block_s=0.0, lease_s=0.6, renew_every_s=0.1, reclaim_every_s=0.0)
        async with Consumer[Any](transport, "prompts", "rollout-0", options) as owner:
            [held] = await owner.take(1)
            other = Consumer[Any](transport, "prompts", "rollout-1", options)
            await asyncio.sleep(0.2)
            assert await other.take(1) == []  # reads the clock
            clock.step(step_s)
            for _ in range(5):
                assert await other.take(1) == []
                await asyncio.sleep(0.1)
            assert not held.lost.is_set()
        async with asyncio.timeout(10):
            while not (taken := await other.take(1)):
                await asyncio.sleep(0.05)
        assert (await trainer.counters())["clock_steps"] == 1
        assert taken[0].group == held.group
        await transport.close()
