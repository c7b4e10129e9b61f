"""The scripted engine: made up, but consistently so."""

import asyncio
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit_wire.messages import PolicyVersion, Sampling
from plaudit_workers.process import RefusedError
from plaudit_workers.rollout.engines.protocol import Engine, SampleRequest
from plaudit_workers.rollout.engines.script import Constant, Exponential, LogNormal, Script, Uniform
from plaudit_workers.rollout.engines.scripted import ScriptedEngine

NOWHERE = Path("nowhere")
V0, V1 = PolicyVersion(1, 0), PolicyVersion(1, 1)


def request(name="a", seed=1, max_tokens=100) -> SampleRequest:
    return SampleRequest(name, [1, 2], Sampling(max_tokens=max_tokens), seed)


async def outcomes(engine, count):
    found = {}
    async with asyncio.timeout(20):
        async for batch in engine.finished():
            found |= {outcome.id: outcome for outcome in batch}
            if len(found) >= count:
                break
    return found


def test_it_is_an_engine() -> None:
    assert isinstance(ScriptedEngine(Script()), Engine)


async def test_a_seed_gives_the_same_sample_on_any_engine() -> None:
    found = []
    for _ in range(2):
        engine = ScriptedEngine(Script(Uniform(0.0, 0.05), LogNormal(20, 1.0)))
        await engine.load_weights(NOWHERE, V0)
        for seed in range(20):
            engine.submit(request(f"s{seed}", seed))
        found.append(await outcomes(engine, 20))
    first, second = found
    assert {k: (s.response_ids, s.logprobs) for k, s in first.items()} == {
        k: (s.response_ids, s.logprobs) for k, s in second.items()
    }
    assert len({tuple(sample.response_ids) for sample in first.values()}) == 20


async def test_nothing_is_generated_before_weights_are_loaded() -> None:
    engine = ScriptedEngine(Script(Constant(0.0)))
    engine.submit(request())
    await asyncio.sleep(0.05)
    assert engine.stats().num_finished == 0
    await engine.load_weights(NOWHERE, V0)
    sample = (await outcomes(engine, 1))["a"]
    assert sample.version_spans == [(0, 1, 0)]
    assert sample.engine_queue_s >= 0.05


@given(
    num_tokens=st.integers(1, 200), max_tokens=st.integers(1, 200), switches=st.lists(st.floats(0, 0.02), max_size=3)
)
def test_spans_cover_every_sample_from_its_first_token_in_order(num_tokens, max_tokens, switches) -> None:
    async def check() -> None:
        engine = ScriptedEngine(Script(Constant(0.03), Constant(num_tokens)))
        await engine.load_weights(NOWHERE, V0)
        engine.submit(request(max_tokens=max_tokens))
        for number, pause_s in enumerate(switches, 1):
            await asyncio.sleep(pause_s)
            await engine.load_weights(NOWHERE, PolicyVersion(1, number))
        sample = (await outcomes(engine, 1))["a"]
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


async def test_a_drained_switch_waits_for_what_runs_and_holds_back_what_is_new() -> None:
    engine = ScriptedEngine(Script(Constant(0.2), Constant(50)))
    await engine.load_weights(NOWHERE, V0)
    engine.submit(request("old"))
    switch = asyncio.create_task(engine.load_weights(NOWHERE, V1, "drain"))
    await asyncio.sleep(0.02)
    engine.submit(request("new"))
    await switch
    found = await outcomes(engine, 2)
    assert found["old"].version_spans == [(0, 1, 0)]
    assert found["new"].version_spans == [(0, 1, 1)]


async def test_no_more_run_at_once_than_there_are_places() -> None:
    engine = ScriptedEngine(Script(Constant(0.1)), max_concurrent_samples=2)
    await engine.load_weights(NOWHERE, V0)
    started = time.monotonic()
    for number in range(6):
        engine.submit(request(str(number)))
    found = await outcomes(engine, 6)
    assert time.monotonic() - started > 0.29  # a timer may ring a little early
    queued = sorted(sample.engine_queue_s for sample in found.values())
    assert queued[1] < 0.09 < queued[2]


async def test_cancelled_samples_are_forgotten_and_their_places_given_on() -> None:
    engine = ScriptedEngine(Script(Constant(0.05)), max_concurrent_samples=1)
    await engine.load_weights(NOWHERE, V0)
    for name in ("running", "waiting", "wanted"):
        engine.submit(request(name))
    engine.cancel(["running", "waiting", "unknown"])
    assert engine.stats().num_unfinished == 1
    assert set(await outcomes(engine, 1)) == {"wanted"}


async def test_a_closed_engine_ends_its_reader() -> None:
    engine = ScriptedEngine(Script(Constant(60.0)))
    await engine.load_weights(NOWHERE, V0)
    engine.submit(request())
    await engine.close()
    assert [batch async for batch in engine.finished()] == []


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
