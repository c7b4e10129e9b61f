"""vLLM itself, on a CPU: what it samples, under which weights, and what it says of that."""

import asyncio

import numpy as np
import pytest
import pytest_asyncio

from plaudit_workers.rollout.engine import FinishedSample, RefusedSample, SampleRequest, WeightsUnreadableError
from plaudit_workers.rollout.vllm_arguments import VllmSettings
from plaudit_workers.rollout.vllm_engine import VllmEngine
from plaudit_workers.stream.records import PolicyVersion, Sampling

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    # vLLM looks at every attribute of torch.distributed when it is imported.
    pytest.mark.filterwarnings("ignore:.torch.distributed.reduce_op. is deprecated:FutureWarning"),
]

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 0] * 15
"""150 tokens: more than one block of the CPU's key-value cache (128), so that the prefix cache holds some of it."""


class Bench:
    """An engine and what has come out of it."""

    def __init__(self, engine):
        self.engine = engine
        self.outcomes = {}
        self.numbers = iter(range(1, 10_000))
        self.changed = asyncio.Event()

    async def read(self):
        async for outcomes in self.engine.finished():
            self.outcomes |= {outcome.id: outcome for outcome in outcomes}
            self.changed.set()

    def submit(self, prompt=PROMPT, seed=1, **sampling):
        sample_id = f"sample-{next(self.numbers)}"
        self.engine.submit(SampleRequest(sample_id, prompt, Sampling(**{"max_tokens": 40} | sampling), seed))
        return sample_id

    async def result(self, sample_id):
        async with asyncio.timeout(30):
            while sample_id not in self.outcomes:
                self.changed.clear()
                await self.changed.wait()
        return self.outcomes[sample_id]

    async def load(self, folder, in_flight="continue"):
        version = PolicyVersion(1, next(self.numbers))
        await self.engine.load_weights(folder, version, in_flight)
        return version

    async def a_while(self):
        """Long enough to begin, too short to sample 200 tokens."""
        await asyncio.sleep(0.05)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def bench(tiny_models):
    settings = VllmSettings(
        str(tiny_models[0]), max_concurrent_samples=16, arguments={"kv_cache_memory_bytes": 64 << 20}
    )
    engine = VllmEngine(settings)
    await engine.start()
    bench = Bench(engine)
    reading = asyncio.create_task(bench.read())
    yield bench
    await engine.close()
    await reading


def close(expected, actual, tolerance=1e-4):
    return np.abs(np.asarray(expected) - np.asarray(actual)).max() < tolerance


async def test_log_probabilities_are_those_of_transformers(bench, tiny_models, reference):
    version = await bench.load(tiny_models[1])
    ids = [bench.submit(seed=seed) for seed in range(8)]
    for sample in [await bench.result(sample_id) for sample_id in ids]:
        assert close(reference(tiny_models[1], PROMPT, sample.response_ids), sample.logprobs)
        assert sample.version_spans == [(0, 1, version.number)]
        assert len(sample.response_ids) == len(sample.logprobs)
        assert sample.num_preempted == 0
        assert 0 <= sample.engine_queue_s < sample.generate_s


@pytest.mark.parametrize(("temperature", "top_k"), [(0.7, -1), (1.3, -1), (1.0, 5)])
async def test_log_probabilities_are_of_the_distribution_that_was_sampled(
    bench, tiny_models, reference, temperature, top_k
):
    await bench.load(tiny_models[1])
    sample = await bench.result(bench.submit(temperature=temperature, top_k=top_k))
    assert close(reference(tiny_models[1], PROMPT, sample.response_ids, temperature, top_k), sample.logprobs)


async def test_the_same_seed_gives_the_same_sample_in_any_company(bench, tiny_models):
    await bench.load(tiny_models[1])
    alone = await bench.result(bench.submit(seed=5))
    crowd = [bench.submit(seed=seed) for seed in range(12)]
    again = await bench.result(crowd[5])
    other = await bench.result(crowd[6])
    assert again.response_ids == alone.response_ids
    assert other.response_ids != alone.response_ids


async def test_a_new_request_never_sees_cached_blocks_of_old_weights(bench, tiny_models, reference):
    await bench.load(tiny_models[1])
    await bench.result(bench.submit(seed=1))
    await bench.load(tiny_models[2])
    sample = await bench.result(bench.submit(seed=1))
    assert close(reference(tiny_models[2], PROMPT, sample.response_ids), sample.logprobs)


async def test_a_switch_in_the_middle_shows_in_the_spans(bench, tiny_models, reference):
    old = await bench.load(tiny_models[1])
    ids = [bench.submit(seed=seed, max_tokens=300) for seed in range(4)]
    await bench.a_while()
    new = await bench.load(tiny_models[2])
    samples = [await bench.result(sample_id) for sample_id in ids]
    switched = [sample for sample in samples if len(sample.version_spans) == 2]
    assert len(switched) >= 2
    for sample in switched:
        (_, _, before), (first, _, after) = sample.version_spans
        assert (before, after) == (old.number, new.number)
        assert 0 < first < len(sample.response_ids)
        expected = reference(tiny_models[1], PROMPT, sample.response_ids)
        assert close(expected[:first], sample.logprobs[:first])
        assert not close(expected[first:], sample.logprobs[first:])


async def test_recompute_samples_the_rest_as_if_the_new_weights_had_read_it_all(bench, tiny_models, reference):
    await bench.load(tiny_models[1])
    ids = [bench.submit(seed=seed, max_tokens=300) for seed in range(4)]
    await bench.a_while()
    await bench.load(tiny_models[2], "recompute")
    samples = [await bench.result(sample_id) for sample_id in ids]
    switched = [sample for sample in samples if len(sample.version_spans) == 2]
    assert len(switched) >= 2
    for sample in switched:
        first = sample.version_spans[1][0]
        assert close(reference(tiny_models[1], PROMPT, sample.response_ids)[:first], sample.logprobs[:first])
        assert close(reference(tiny_models[2], PROMPT, sample.response_ids)[first:], sample.logprobs[first:])
        assert sample.num_preempted == 0


async def test_drain_ends_what_runs_under_the_old_weights_first(bench, tiny_models, reference):
    old = await bench.load(tiny_models[1])
    running = [bench.submit(seed=seed, max_tokens=200) for seed in range(4)]
    await bench.a_while()
    switch = asyncio.create_task(bench.load(tiny_models[2], "drain"))
    await asyncio.sleep(0)
    late = bench.submit(seed=9)
    new = await switch
    for sample in [await bench.result(sample_id) for sample_id in running]:
        assert sample.version_spans == [(0, 1, old.number)]
    sample = await bench.result(late)
    assert sample.version_spans == [(0, 1, new.number)]
    assert close(reference(tiny_models[2], PROMPT, sample.response_ids), sample.logprobs)


async def test_what_has_not_begun_at_a_switch_begins_under_the_new_weights_alone(bench, tiny_models, reference):
    await bench.load(tiny_models[1])
    ids = [bench.submit(seed=seed, max_tokens=100) for seed in range(40)]  # 16 run at a time
    await bench.a_while()
    new = await bench.load(tiny_models[2])
    samples = [await bench.result(sample_id) for sample_id in ids]
    fresh = [sample for sample in samples if sample.version_spans == [(0, 1, new.number)]]
    assert len(fresh) >= 16
    for sample in fresh:
        assert close(reference(tiny_models[2], PROMPT, sample.response_ids), sample.logprobs)


async def test_the_probe_tells_the_held_weights(bench, tiny_models, reference):
    for folder in tiny_models[1:]:
        await bench.load(folder)
        assert close(reference(folder, PROMPT[:1], PROMPT[1:]), await bench.engine.probe(PROMPT))


async def test_a_response_ends_with_its_end_token_or_is_cut(bench, tiny_models):
    await bench.load(tiny_models[1])
    ids = [bench.submit(seed=seed, max_tokens=30, temperature=2.0) for seed in range(16)]
    samples = [await bench.result(sample_id) for sample_id in ids]
    for sample in samples:
        ended = sample.response_ids[-1] == 14
        assert sample.finish_reason == ("stop" if ended else "length")
        assert 14 not in sample.response_ids[:-1]
        assert ended or len(sample.response_ids) == 30
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}


async def test_text_leaves_special_tokens_out(bench):
    assert bench.engine.decode([1, 2, 10, 3, 11, 14]) == "12+3="


async def test_a_prompt_longer_than_the_model_is_refused_and_others_go_on(bench, tiny_models):
    await bench.load(tiny_models[1])
    refused = await bench.result(bench.submit(prompt=[1] * 600))
    assert isinstance(refused, RefusedSample)
    assert "600" in refused.reason
    hot = await bench.result(bench.submit(temperature=9.0))
    assert isinstance(hot, RefusedSample)
    assert "temperature" in hot.reason
    assert isinstance(await bench.result(bench.submit()), FinishedSample)


async def test_a_cancelled_request_is_never_heard_of_again(bench, tiny_models):
    await bench.load(tiny_models[1])
    unwanted, wanted = bench.submit(max_tokens=300), bench.submit(max_tokens=300, seed=2)
    before = bench.engine.stats()
    bench.engine.cancel([unwanted])
    assert bench.engine.stats().num_unfinished == before.num_unfinished - 1
    await bench.result(wanted)
    assert unwanted not in bench.outcomes


async def test_nothing_is_sampled_after_a_failed_load_until_one_succeeds(bench, tiny_models, tmp_path, reference):
    await bench.load(tiny_models[1])
    with pytest.raises(WeightsUnreadableError):
        await bench.load(tmp_path / "vanished")
    waiting = bench.submit()
    await asyncio.sleep(0.2)
    assert waiting not in bench.outcomes
    new = await bench.load(tiny_models[2])
    sample = await bench.result(waiting)
    assert sample.version_spans == [(0, 1, new.number)]
    assert close(reference(tiny_models[2], PROMPT, sample.response_ids), sample.logprobs)
