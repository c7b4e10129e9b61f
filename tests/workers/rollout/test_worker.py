"""The worker on real streams with a scripted engine."""

import asyncio

import numpy as np

from plaudit_workers.rollout.script import Constant, Script, Uniform
from plaudit_workers.rollout.scripted_engine import ScriptedEngine
from plaudit_workers.stream.records import PolicyVersion, Sampling

Sampling_100 = Sampling(max_tokens=100)


async def _busy(worker, count) -> bool:
    return worker.busy >= count


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


async def test_nothing_is_taken_before_a_policy_is_announced(run, start_worker, eventually) -> None:
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


async def test_a_switch_in_the_middle_of_a_sample_shows_in_its_spans(run, start_worker, eventually) -> None:
    await run.announce(0)
    await run.admit("t-0-1.0", n=1, sampling=Sampling_100)
    async with start_worker(engine(latency_s=1.0, tokens=100)) as (worker, _):
        await eventually(lambda: _busy(worker, 1))
        await asyncio.sleep(0.3)
        await run.announce(1)
        group = await run.published("t-0-1.0", 1)
    (first, second) = group.samples[0].body.version_spans
    assert first == (0, run.trainer.incarnation, 0)
    assert 10 < second[0] < 95
    assert second[1:] == (run.trainer.incarnation, 1)
    assert (group.samples[0].body.generation.version_min, group.samples[0].body.generation.version_max) == (0, 1)
