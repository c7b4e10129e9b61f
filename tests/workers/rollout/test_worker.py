"""The worker on real streams with a scripted engine."""

import asyncio
import contextlib

import numpy as np
import pytest

from plaudit_wire.messages import PolicyVersion, Sampling
from plaudit_workers.agents.messages import Trajectory
from plaudit_workers.rollout.agents.agent import SingleTurn
from plaudit_workers.rollout.engine import EngineFailedError, RequestRefusedError
from plaudit_workers.rollout.scripted import Constant, Script, ScriptedEngine, Uniform
from plaudit_workers.rollout.worker import RolloutOptions, RolloutWorker
from plaudit_workers.stream.consumer import Consumer, ConsumerOptions
from waiting import until

QUICK = ConsumerOptions(block_s=0.05, reclaim_every_s=0.05, renew_every_s=0.1)
LONG = Sampling(max_tokens=100)


async def busy(worker, count: int) -> bool:
    return worker.busy == count


def engine(latency_s: float = 0.02, tokens: int = 5, **options: object) -> ScriptedEngine:
    return ScriptedEngine(Script(Constant(latency_s), Constant(tokens)), **options)  # type: ignore[arg-type]


async def test_every_sample_of_an_admitted_prompt_is_published(run, start_worker) -> None:
    version = await run.announce(0)
    await run.admit("t-0-1.0", n=3)
    async with start_worker(engine()):
        group = await run.published("t-0-1.0", 3)
    for index, sample in enumerate(group.samples):
        body = sample.body
        assert np.frombuffer(body.response_ids, "<i4").size == 5
        assert np.frombuffer(body.logprobs, "<f4").size == 5
        assert body.loss_mask == b"\x01" * 5
        assert body.version_spans == [(0, version.incarnation, version.number)]
        assert body.generation.worker == "rollout-0"
        assert body.generation.prompt_tokens == 4
        assert body.generation.response_tokens == 5
        assert body.generation.generate_s >= 0.02
        assert body.sample.index == index
        assert body.sample.response == " ".join(map(str, np.frombuffer(body.response_ids, "<i4")))
        assert body.sample.ground_truth == "0123"
        assert sample.stamps.taken <= sample.stamps.published
    assert await run.transport.commands.xlen(run.transport.names.prompts) == 0


async def test_a_sample_is_published_when_it_finishes_not_when_its_group_does(run, start_worker) -> None:
    await run.announce(0)
    await run.admit("t-0-1.0", n=8)
    async with start_worker(ScriptedEngine(Script(Uniform(0.05, 1.0)))):
        group = await run.published("t-0-1.0", 8)
    published = sorted(sample.stamps.published for sample in group.samples)
    assert published[-1] - published[0] > 0.2


async def test_nothing_is_taken_before_a_policy_is_announced(run, start_worker) -> None:
    await run.admit("t-0-1.0")
    async with start_worker(engine()) as (worker, _):
        await asyncio.sleep(0.5)
        assert not worker.ready
        pending = await run.transport.commands.xpending(run.transport.names.prompts, "rollout")
        assert pending["pending"] == 0
        await run.announce(3)
        group = await run.published("t-0-1.0", 2)
        assert worker.ready
    assert group.samples[0].body.version_spans[0][2] == 3


async def test_a_prompt_waits_for_the_version_that_may_generate_it(run, start_worker) -> None:
    await run.announce(0)
    await run.admit("t-0-1.0", min_version=PolicyVersion(run.trainer.incarnation, 2))
    async with start_worker(engine()):
        await run.admit("t-1-1.0")
        await run.published("t-1-1.0", 2)
        early = await run.trainer.read("t-0-1.0")
        assert all(sample.body is None for sample in early.samples)
        await run.announce(2)
        group = await run.published("t-0-1.0", 2)
    assert [sample.body.generation.version_min for sample in group.samples] == [2, 2]


async def test_a_switch_in_the_middle_of_a_sample_shows_in_its_spans(run, start_worker) -> None:
    await run.announce(0)
    await run.admit("t-0-1.0", n=1, sampling=LONG)
    async with start_worker(engine(latency_s=2.0, tokens=100)) as (worker, _):
        await until(lambda: busy(worker, 1))
        await asyncio.sleep(0.1)  # some tokens, and time enough for the others on a busy machine
        await run.announce(1)
        group = await run.published("t-0-1.0", 1)
    (first, second) = group.samples[0].body.version_spans
    assert first == (0, run.trainer.incarnation, 0)
    assert 0 < second[0] < 99
    assert second[1:] == (run.trainer.incarnation, 1)
    assert (group.samples[0].body.generation.version_min, group.samples[0].body.generation.version_max) == (0, 1)


class Probed(ScriptedEngine):
    """Answers the probe of its second weights when it is told to."""

    def __init__(self, *scripted) -> None:
        super().__init__(*scripted)
        self.probes = 0
        self.asked, self.answer = asyncio.Event(), asyncio.Event()
        self.finished = 0

    async def generate(self, request):
        sample = await super().generate(request)
        self.finished += 1
        return sample

    async def probe(self, ids):
        self.probes += 1
        if self.probes > 1:
            self.asked.set()
            await self.answer.wait()
        return [-1.0, -2.0]


@pytest.mark.parametrize("agrees", [True, False])
async def test_a_sample_is_published_when_the_probe_of_its_weights_agrees(
    run, start_worker, probe_file, agrees
) -> None:
    for number, second in ((0, -2.0), (1, -2.0 if agrees else -5.0)):
        folder = run.folder / str(PolicyVersion(run.trainer.incarnation, number))
        folder.mkdir(parents=True)
        probe_file(folder, [1, 2, 3], [-1.0, second])
    await run.announce(0)
    await run.admit("t-0-1.0", n=4, sampling=LONG)
    probed = Probed(Script(Constant(1.0), Constant(100)))

    async def finished() -> bool:
        return probed.finished == 4

    async def published() -> list[bool]:
        return [sample.body is not None for sample in (await run.trainer.read("t-0-1.0")).samples]

    async def work() -> None:
        async with start_worker(probed) as (worker, _):
            await until(lambda: busy(worker, 4))
            await run.announce(1)
            await probed.asked.wait()
            await until(finished)
            await asyncio.sleep(0.3)
            assert await published() == [False] * 4
            probed.answer.set()
            if agrees:
                await run.published("t-0-1.0", 4)

    if agrees:
        await work()
    else:
        with pytest.raises(EngineFailedError, match="does not compute with these weights"):
            await asyncio.wait_for(work(), 20)
    assert await published() == [agrees] * 4


class HalfDead(ScriptedEngine):
    """Never finishes a sample with an odd seed."""

    async def generate(self, request):
        if request.seed % 2:
            await asyncio.sleep(600)
        return await super().generate(request)


class Counting(ScriptedEngine):
    """Counts the samples that somebody awaits."""

    unfinished = 0

    async def generate(self, request):
        self.unfinished += 1
        try:
            return await super().generate(request)
        finally:
            self.unfinished -= 1


async def test_a_redelivered_prompt_generates_only_its_missing_samples_with_the_same_result(run, start_worker) -> None:
    await run.announce(0)
    await run.admit("t-0-1.0", n=6, seed=40)
    async with start_worker(HalfDead(Script()), name="rollout-0", drain_grace_s=0.0):
        before = await run.published("t-0-1.0", 3)
    assert [sample.body is not None for sample in before.samples] == [True, False] * 3
    await run.admit("t-1-1.0", n=6, seed=40)
    async with start_worker(ScriptedEngine(Script()), name="rollout-1"):
        interrupted = await run.published("t-0-1.0", 6)
        undisturbed = await run.published("t-1-1.0", 6)
    workers = [sample.body.generation.worker for sample in interrupted.samples]
    assert workers == ["rollout-0", "rollout-1"] * 3
    for mine, reference in zip(interrupted.samples, undisturbed.samples, strict=True):
        assert mine.body.response_ids == reference.body.response_ids
        assert mine.body.logprobs == reference.body.logprobs


async def takes(consumer, group: str) -> bool:
    """Whether the consumer is handed the group, as if nobody had worked on it before."""
    return [(delivery.group, delivery.deliveries) for delivery in await consumer.take(5)] == [(group, 1)]


class HangsOnSecond(SingleTurn):
    """Never ends the samples of one group."""

    async def run(self, prompt, generate) -> Trajectory:
        if prompt.group == "t-1-1.0":
            await asyncio.sleep(600)
        return await super().run(prompt, generate)


async def test_a_stopped_worker_finishes_samples_in_time_and_releases_the_rest(run, start_worker) -> None:
    await run.announce(0)
    await run.admit("t-0-1.0", n=1)
    await run.admit("t-1-1.0", n=1)
    async with start_worker(engine(0.4), agent=HangsOnSecond(), drain_grace_s=2.0) as (worker, stop):
        await until(lambda: busy(worker, 2))
        stop.set()
        assert (await run.trainer.read("t-0-1.0")).samples[0].body is None
    assert not worker.ready
    assert (await run.trainer.read("t-0-1.0")).samples[0].body is not None
    options = ConsumerOptions(block_s=0.05, renew_every_s=0.1)
    async with Consumer(run.transport, "prompts", "rollout-1", options) as successor:
        await until(lambda: takes(successor, "t-1-1.0"))


async def test_a_lost_lease_ends_the_work_and_frees_its_places(run, start_worker) -> None:
    await run.announce(0)
    await run.admit("t-0-1.0", n=4)
    slow = Counting(Script(Constant(60.0)))
    async with start_worker(slow) as (worker, _):
        await until(lambda: busy(worker, 4))
        async with Consumer(run.transport, "prompts", "thief") as thief:
            (stolen,) = await thief.reclaim(1, lease_s=0.0)
            assert stolen.payload.group == "t-0-1.0"
            await until(lambda: busy(worker, 0))
            assert slow.unfinished == 0


async def test_work_on_a_group_that_is_gone_stops(run, start_worker) -> None:
    await run.announce(0)
    await run.admit("t-0-1.0", n=5)
    slow = Counting(Script(Uniform(0.2, 60.0)))
    async with start_worker(slow) as (worker, _):
        await until(lambda: busy(worker, 5))
        await run.trainer.close("t-0-1.0", "dropped", "rolled_back")
        await until(lambda: busy(worker, 0), within_s=60.0)
        assert slow.unfinished == 0
        assert await run.transport.commands.xlen(run.transport.names.prompts) == 0


class FailsOnOdd:
    """An agent with a bug."""

    async def run(self, prompt, generate) -> Trajectory:
        trajectory = Trajectory()
        sample = await generate([1, 2])
        if sample.response_ids[0] % 2:
            raise ZeroDivisionError("odd")
        trajectory.add_turn(sample)
        return trajectory


async def test_an_agent_that_raises_costs_its_own_samples_only(run, start_worker) -> None:
    await run.announce(0)
    await run.admit("t-0-1.0", n=8)

    async def all_decided() -> bool:
        group = await run.trainer.read("t-0-1.0")
        return all(sample.body or sample.scoring for sample in group.samples)

    async with start_worker(engine(), agent=FailsOnOdd()) as (worker, _):
        await until(all_decided)
        await run.admit("t-1-1.0", n=1, seed=12)
        assert worker.ready
    group = await run.trainer.read("t-0-1.0")
    failed = [sample.body for sample in group.samples if sample.body.sample.failure is not None]
    fine = [sample for sample in group.samples if sample.body.sample.failure is None]
    assert failed
    assert fine
    assert {body.sample.failure.outcome for body in failed} == {"data_error"}
    assert all("ZeroDivisionError: odd" in body.sample.failure.reason for body in failed)
    assert all(np.frombuffer(sample.body.response_ids, "<i4")[0] % 2 == 0 for sample in fine)


class Broken(ScriptedEngine):
    """An engine whose thread dies."""

    async def generate(self, request):
        raise EngineFailedError("the device fell off the bus")


async def test_a_broken_engine_ends_the_worker_and_its_prompts_are_free_at_once(run, start_worker) -> None:
    await run.announce(0)
    await run.admit("t-0-1.0", n=2)
    with pytest.raises(EngineFailedError, match="fell off"):
        async with start_worker(Broken(Script())):
            await asyncio.sleep(1.0)
    async with start_worker(engine(), name="rollout-1"):
        await run.published("t-0-1.0", 2)


UNFIT = {
    "messages[0].n: is an integer beyond 64 bits": {"messages": [{"role": "tool", "n": 1 << 67}]},
    "environment.now: is of type object": {"environment": {"now": object()}},
    "which is no token id": {"prompt_ids": [1 << 40]},
    "loss_mask holds something else": {"loss_mask": [7]},
    "rewards holds a number that is not finite": {"turn_rewards": [float("nan")]},
    "version_spans do not begin at growing places": {"version_spans": [(0, 1, 0), (9, 1, 0)]},
}
"""Why a trajectory cannot be published, and what is wrong with it."""


class Unfit:
    """Returns one unfit trajectory after the other; half a character is no reason to fail."""

    def __init__(self) -> None:
        self.changes = [*UNFIT.values(), {"messages": [{"role": "tool", "content": "half \ud800"}]}]

    async def run(self, prompt, generate) -> Trajectory:
        trajectory = Trajectory()
        trajectory.add_turn(await generate([1, 2], 1))
        for name, value in self.changes.pop().items():
            setattr(trajectory, name, value)
        return trajectory


async def test_a_trajectory_that_cannot_travel_costs_its_sample_only(run, start_worker) -> None:
    await run.announce(0)
    await run.admit("t-0-1.0", n=len(UNFIT) + 1)
    async with start_worker(engine(), agent=Unfit()):
        group = await run.published("t-0-1.0", len(UNFIT) + 1)
    samples = [sample.body.sample for sample in group.samples]
    reasons = [sample.failure.reason for sample in samples if sample.failure is not None]
    assert len(reasons) == len(UNFIT)
    assert all(any(part in reason for reason in reasons) for part in UNFIT)
    assert [sample.completion[0]["content"] for sample in samples if sample.failure is None] == ["half \ufffd"]


class RefusesLong(ScriptedEngine):
    """An engine with a short model."""

    async def generate(self, request):
        if len(request.prompt_ids) > 4:
            raise RequestRefusedError("longer than the model's length")
        return await super().generate(request)


class Continues:
    async def run(self, prompt, generate) -> Trajectory:
        trajectory = Trajectory()
        trajectory.add_turn(await generate([1, 2]))
        trajectory.add_turn(await generate([1, 2, *trajectory.response_ids]))
        return trajectory


async def test_a_conversation_beyond_the_models_length_ends_its_sample_and_a_prompt_beyond_it_is_poison(
    run, start_worker
) -> None:
    await run.announce(0)
    await run.admit("t-0-1.0", n=1)
    await run.admit("t-1-1.0", n=1, prompt_ids=np.arange(9, dtype="<i4").tobytes())
    async with start_worker(RefusesLong(Script()), agent=Continues()):
        (sample,) = (await run.published("t-0-1.0", 1)).samples

        async def ended() -> bool:
            return all(sample.scoring for sample in (await run.trainer.read("t-1-1.0")).samples)

        await until(ended)
    assert sample.body.sample.failure.outcome == "data_error"
    assert sample.body.sample.failure.reason == "longer than the model's length"
    (refused,) = (await run.trainer.read("t-1-1.0")).samples
    assert refused.scoring.outcome == "poison"
    assert "longer than the model's length" in refused.scoring.reason


class EndsOnTwo(ScriptedEngine):
    """An engine that the prompts of two samples break."""

    async def generate(self, request):
        if request.prompt_ids[0] == 2:
            raise EngineFailedError("the device fell off the bus")
        return await super().generate(request)


async def test_a_prompt_that_ends_its_rollouts_becomes_poison_and_its_neighbour_does_not(run, start_worker) -> None:
    await run.announce(0)
    await run.admit("t-0-1.0", n=2, prompt_ids=np.asarray([2], "<i4").tobytes())
    await run.admit("t-1-1.0", n=1)

    async def poisoned() -> bool:
        return all(sample.scoring is not None for sample in (await run.trainer.read("t-0-1.0")).samples)

    async def live(number: int) -> None:
        """Run one worker until its engine breaks, or until there is nothing left to break it."""
        stop, options = asyncio.Event(), RolloutOptions(consumer=QUICK)
        worker = RolloutWorker(f"rollout-{number}", run.transport, EndsOnTwo(Script()), SingleTurn(), options)
        running = asyncio.create_task(worker.run(stop))
        await until(lambda: running.done() or poisoned())
        stop.set()
        await running

    lives = 0
    while not await poisoned():
        lives += 1
        assert lives <= 6
        with contextlib.suppress(EngineFailedError):
            await live(lives)
    assert lives >= 4
    assert {sample.scoring.outcome for sample in (await run.trainer.read("t-0-1.0")).samples} == {"poison"}
    async with start_worker(engine(), name="rollout-last"):
        await run.published("t-1-1.0", 1)


async def test_a_prompt_without_room_in_one_worker_goes_to_another(run, start_worker) -> None:
    await run.announce(0)
    for number in range(8):
        await run.admit(f"t-{number}-1.0", n=4)
    room = {"max_concurrent_samples": 12, "samples_per_prompt": 4}
    async with (
        start_worker(engine(1.0), name="rollout-0", **room),
        start_worker(engine(1.0), name="rollout-1", **room),
    ):
        groups = [await run.published(f"t-{number}-1.0", 4) for number in range(8)]
    workers = [{sample.body.generation.worker for sample in group.samples} for group in groups]
    assert sorted(workers, key=str) == [{"rollout-0"}] * 4 + [{"rollout-1"}] * 4


async def test_no_more_is_taken_than_there_is_room_for(run, start_worker) -> None:
    await run.announce(0)
    for number in range(10):
        await run.admit(f"t-{number}-1.0", n=4)
    async with start_worker(engine(0.3), max_concurrent_samples=8, samples_per_prompt=4) as (worker, _):
        await until(lambda: busy(worker, 12))
        pending = await run.transport.commands.xpending(run.transport.names.prompts, "rollout")
        assert pending["pending"] == 3
        for number in range(10):
            await run.published(f"t-{number}-1.0", 4)


async def test_the_heartbeat_tells_version_and_load(run, start_worker) -> None:
    version = await run.announce(0)
    loading = []

    async def seen_loading() -> bool:
        loading.extend(record.loading for record in await run.transport.workers() if record.loading)
        return bool(loading)

    slow_to_load = ScriptedEngine(Script(Constant(0.02), load_seconds=0.5))
    async with start_worker(slow_to_load, max_concurrent_samples=9):
        await until(seen_loading)
        assert loading[0] == str(version)
        await run.admit("t-0-1.0")
        await run.published("t-0-1.0", 2)
        (record,) = await run.transport.workers()
    assert (record.role, record.slots, record.version, record.loading, record.ready) == (
        "rollout",
        9,
        str(version),
        "",
        True,
    )
