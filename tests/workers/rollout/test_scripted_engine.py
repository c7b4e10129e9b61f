"""The scripted engine: made up, but consistently so."""

import asyncio
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit_wire.errors import RefusedError
from plaudit_wire.messages import PolicyVersion, Sampling
from plaudit_workers.rollout.engine import Engine, SampleRequest
from plaudit_workers.rollout.scripted import Constant, Exponential, LogNormal, Script, ScriptedEngine, Uniform

NOWHERE = Path("nowhere")
V0, V1 = PolicyVersion(1, 0), PolicyVersion(1, 1)


def start(engine, seed=1, max_tokens=100) -> asyncio.Task:
    return asyncio.create_task(engine.generate(SampleRequest([1, 2], Sampling(max_tokens=max_tokens), seed)))


async def results(tasks):
    async with asyncio.timeout(20):
        return await asyncio.gather(*tasks)


def test_it_is_an_engine() -> None:
    assert isinstance(ScriptedEngine(Script()), Engine)


async def test_a_seed_gives_the_same_sample_on_any_engine() -> None:
    found = []
    for _ in range(2):
        engine = ScriptedEngine(Script(Uniform(0.0, 0.05), LogNormal(20, 1.0)))
        await engine.load_weights(NOWHERE, V0)
        samples = await results(start(engine, seed) for seed in range(20))
        found.append([(sample.response_ids, sample.logprobs) for sample in samples])
    first, second = found
    assert first == second
    assert len({tuple(response_ids) for response_ids, _ in first}) == 20


async def test_nothing_is_generated_before_weights_are_loaded() -> None:
    engine = ScriptedEngine(Script(Constant(0.0)))
    waiting = start(engine)
    await asyncio.sleep(0.06)
    assert not waiting.done()
    await engine.load_weights(NOWHERE, V0)
    (sample,) = await results([waiting])
    assert sample.version_spans == [(0, 1, 0)]
    assert sample.engine_queue_s >= 0.05


@given(
    num_tokens=st.integers(1, 200), max_tokens=st.integers(1, 200), switches=st.lists(st.floats(0, 0.02), max_size=3)
)
def test_spans_cover_every_sample_from_its_first_token_in_order(num_tokens, max_tokens, switches) -> None:
    async def check() -> None:
        engine = ScriptedEngine(Script(Constant(0.03), Constant(num_tokens)))
        await engine.load_weights(NOWHERE, V0)
        running = start(engine, max_tokens=max_tokens)
        for number, pause_s in enumerate(switches, 1):
            await asyncio.sleep(pause_s)
            await engine.load_weights(NOWHERE, PolicyVersion(1, number))
        (sample,) = await results([running])
        starts = [first for first, _, _ in sample.version_spans]
        numbers = [number for _, _, number in sample.version_spans]
        length = min(num_tokens, max_tokens)
        assert len(sample.response_ids) == len(sample.logprobs) == length
        assert sample.finish_reason == ("length" if num_tokens > max_tokens else "stop")
        assert starts[0] == 0
        assert starts == sorted(set(starts))
        assert numbers == sorted(set(numbers))
        assert starts[-1] < length
        assert all(logprob <= 0 for logprob in sample.logprobs)

    asyncio.run(check())


async def test_a_drained_switch_waits_for_running_requests_and_holds_back_new_ones() -> None:
    engine = ScriptedEngine(Script(Constant(0.2), Constant(50)))
    await engine.load_weights(NOWHERE, V0)
    old = start(engine)
    await asyncio.sleep(0.02)
    switch = asyncio.create_task(engine.load_weights(NOWHERE, V1, "drain"))
    await asyncio.sleep(0.02)
    new = start(engine)
    await switch
    assert [sample.version_spans for sample in await results([old, new])] == [[(0, 1, 0)], [(0, 1, 1)]]


async def test_no_more_run_at_once_than_there_are_places() -> None:
    engine = ScriptedEngine(Script(Constant(0.1)), max_concurrent_samples=2)
    await engine.load_weights(NOWHERE, V0)
    started = time.monotonic()
    found = await results(start(engine) for _ in range(6))
    assert time.monotonic() - started > 0.29  # a timer may ring a little early
    queued = sorted(sample.engine_queue_s for sample in found)
    assert queued[1] < 0.09 < queued[2]


async def test_the_places_of_cancelled_samples_are_free_for_others() -> None:
    engine = ScriptedEngine(Script(Constant(60.0), Constant(5)), max_concurrent_samples=1)
    await engine.load_weights(NOWHERE, V0)
    running, waiting = start(engine), start(engine)
    await asyncio.sleep(0.01)
    wanted = start(engine)
    for unwanted in (running, waiting):
        unwanted.cancel()
    await asyncio.wait([running, waiting])
    switch = asyncio.create_task(engine.load_weights(NOWHERE, V1, "drain"))
    await asyncio.sleep(0.01)
    assert not switch.done()  # the one that is wanted has begun
    wanted.cancel()
    await asyncio.wait_for(switch, 20)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, Script()),
        ({"latencySeconds": {"kind": "uniform", "low": 1, "high": 2}}, Script(latency_seconds=Uniform(1, 2))),
        ({"responseTokens": {"kind": "exponential", "mean": 64}}, Script(response_tokens=Exponential(64))),
        ({"loadSeconds": 1.5, "vocabularySize": 9}, Script(load_seconds=1.5, vocabulary_size=9)),
    ],
)
def test_a_script_is_read_from_the_jobs_arguments(arguments, expected) -> None:
    assert Script.from_arguments(arguments) == expected


@pytest.mark.parametrize("arguments", [{"latency": 3}, {"latencySeconds": {"kind": "normal"}}, {"loadSeconds": "long"}])
def test_an_argument_that_is_unknown_or_wrong_is_refused(arguments) -> None:
    with pytest.raises(RefusedError, match=r"spec\.rollout\.engine\.arguments"):
        Script.from_arguments(arguments)
