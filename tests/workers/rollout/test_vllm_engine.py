"""vLLM itself, on a CPU: what it samples, under which weights, and what it says of that."""

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from delta_series import DeltaSeries
from plaudit_wire.errors import RefusedError
from plaudit_wire.messages import PolicyVersion, Sampling, Transfer, TransferPart
from plaudit_wire.redis import RedisAddress
from plaudit_workers.agents.messages import FinishedSample
from plaudit_workers.rollout.agents.agent import SingleTurn
from plaudit_workers.rollout.engine import (
    EngineFailedError,
    RequestRefusedError,
    SampleRequest,
    WeightsUnreadableError,
)
from plaudit_workers.rollout.vllm_arguments import VllmSettings
from plaudit_workers.rollout.vllm_engine import VllmEngine
from plaudit_workers.rollout.weights import PolicyWeights
from plaudit_workers.rollout.worker import RolloutOptions, RolloutWorker
from plaudit_workers.stream.transport import Transport
from plaudit_workers.training.model.weight_offer import shapes_of
from plaudit_workers.weights.files import WeightFiles
from plaudit_workers.weights.receive import Reception
from plaudit_workers.weights.send import WeightPart, WeightServer

pytestmark = [
    pytest.mark.engines,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),  # importing vLLM takes 10 s, and much more beside other work
    # vLLM looks at every attribute of torch.distributed when it is imported.
    pytest.mark.filterwarnings("ignore:.torch.distributed.reduce_op. is deprecated:FutureWarning"),
]

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 0] * 15
"""150 tokens: more than one block of the CPU's key-value cache (128), so that the prefix cache holds some of it."""


class Bench:
    """An engine and the numbers of its policy versions."""

    def __init__(self, engine):
        self.engine = engine
        self.numbers = iter(range(1, 10_000))

    def submit(self, prompt=PROMPT, seed=1, **sampling):
        request = SampleRequest(prompt, Sampling(**{"max_tokens": 40} | sampling), seed)
        return asyncio.create_task(self.engine.generate(request))

    async def result(self, task):
        return await asyncio.wait_for(task, 30)

    async def load(self, folder, switch="continue"):
        version = PolicyVersion(1, next(self.numbers))
        await self.engine.load_weights(folder, version, switch)
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
    yield Bench(engine)
    await engine.close()


def close(expected, actual, tolerance=1e-4):
    return np.abs(np.asarray(expected) - np.asarray(actual)).max() < tolerance


async def test_log_probabilities_are_those_of_transformers(bench, tiny_models, reference):
    version = await bench.load(tiny_models[1])
    tasks = [bench.submit(seed=seed) for seed in range(8)]
    for sample in [await bench.result(task) for task in tasks]:
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


async def test_temperature_0_takes_the_likeliest_token_and_tells_the_policys_own_log_probability(
    bench, tiny_models, reference
):
    await bench.load(tiny_models[1])
    sample = await bench.result(bench.submit(temperature=0.0, max_tokens=20))
    expected = reference(tiny_models[1], PROMPT, sample.response_ids)
    assert close(expected, sample.logprobs)
    for token in range(16):
        other = reference(tiny_models[1], PROMPT, [token])
        assert other[0] <= expected[0]


async def test_weights_received_from_the_trainers_memory_are_the_ones_that_sample(bench, tiny_models, reference):
    version = PolicyVersion(1, next(bench.numbers))
    content = (tiny_models[2] / "model.safetensors").read_bytes()
    part, server = WeightPart.of([(0, memoryview(content))]), WeightServer()
    server.offer(version, "token", part)
    offered = Transfer("token", len(content), [TransferPart(f"127.0.0.1:{server.port}", part.digest)])
    with Reception(version, offered) as reception:
        await bench.engine.load_weights(await asyncio.to_thread(reception.receive), version)
    server.close()
    sample = await bench.result(bench.submit(seed=3))
    assert close(reference(tiny_models[2], PROMPT, sample.response_ids), sample.logprobs)


async def test_weights_in_several_files_are_the_ones_that_sample(bench, tiny_models, reference, tmp_path):
    tensors = load_file(tiny_models[2] / "model.safetensors")
    files = WeightFiles.plan(shapes_of(tensors, torch.float32), "model.safetensors", 3)
    for rank in range(3):
        files.write_own(tmp_path, rank, ((name, tensors[name]) for name in files.order))
    for name, content in files.index().items():
        (tmp_path / name).write_bytes(content)
    await bench.load(tmp_path)
    sample = await bench.result(bench.submit(seed=3))
    assert close(reference(tiny_models[2], PROMPT, sample.response_ids), sample.logprobs)


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


async def test_cached_blocks_of_other_weights_with_the_same_version_are_not_used(bench, tiny_models, reference):
    version = PolicyVersion(1, next(bench.numbers))
    for folder in tiny_models[1:]:
        await bench.engine.load_weights(folder, version)
        sample = await bench.result(bench.submit(seed=1))
        assert close(reference(folder, PROMPT, sample.response_ids), sample.logprobs)


async def test_a_switch_in_the_middle_shows_in_the_spans(bench, tiny_models, reference):
    old = await bench.load(tiny_models[1])
    tasks = [bench.submit(seed=seed, max_tokens=300) for seed in range(4)]
    await bench.a_while()
    new = await bench.load(tiny_models[2])
    samples = [await bench.result(task) for task in tasks]
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
    tasks = [bench.submit(seed=seed, max_tokens=300) for seed in range(4)]
    await bench.a_while()
    await bench.load(tiny_models[2], "recompute")
    samples = [await bench.result(task) for task in tasks]
    switched = [sample for sample in samples if len(sample.version_spans) == 2]
    assert len(switched) >= 2
    for sample in switched:
        first = sample.version_spans[1][0]
        assert close(reference(tiny_models[1], PROMPT, sample.response_ids)[:first], sample.logprobs[:first])
        assert close(reference(tiny_models[2], PROMPT, sample.response_ids)[first:], sample.logprobs[first:])
        assert sample.num_preempted == 0


async def test_a_sleeping_engine_samples_nothing_until_it_has_weights_again(bench, tiny_models, reference):
    old = await bench.load(tiny_models[1])
    tasks = [bench.submit(seed=seed, max_tokens=300) for seed in range(4)]
    while bench.engine.status() is None or bench.engine.status().running < 4:
        await asyncio.sleep(0.01)
    await bench.a_while()
    await bench.engine.sleep()
    late = bench.submit(seed=9)
    done = [task.done() for task in tasks]
    await asyncio.sleep(0.3)
    assert [task.done() for task in tasks] == done
    assert not late.done()
    await bench.engine.sleep()  # as after an update that follows another one at once
    new = await bench.load(tiny_models[2])
    samples = [await bench.result(task) for task in tasks]
    switched = [sample for sample in samples if len(sample.version_spans) == 2]
    assert len(switched) >= 2
    for sample in switched:
        (_, _, before), (first, _, after) = sample.version_spans
        assert (before, after) == (old.number, new.number)
        assert close(reference(tiny_models[1], PROMPT, sample.response_ids)[:first], sample.logprobs[:first])
        assert close(reference(tiny_models[2], PROMPT, sample.response_ids)[first:], sample.logprobs[first:])
        assert sample.num_preempted == 0
    sample = await bench.result(late)
    assert sample.version_spans == [(0, 1, new.number)]
    assert close(reference(tiny_models[2], PROMPT, sample.response_ids), sample.logprobs)


async def test_a_load_that_fails_leaves_a_sleeping_engine_ready_for_the_next_one(
    bench, tiny_models, tmp_path, reference
):
    await bench.load(tiny_models[1])
    await bench.engine.sleep()
    with pytest.raises(WeightsUnreadableError):
        await bench.load(tmp_path / "vanished")
    await bench.load(tiny_models[2])
    sample = await bench.result(bench.submit(seed=1))
    assert close(reference(tiny_models[2], PROMPT, sample.response_ids), sample.logprobs)


async def test_drain_finishes_samples_before_the_engine_sleeps(bench, tiny_models):
    old = await bench.load(tiny_models[1])
    running = [bench.submit(seed=seed, max_tokens=200) for seed in range(4)]
    await bench.a_while()
    await bench.engine.sleep("drain")
    assert all(task.done() for task in running)
    assert [(await task).version_spans for task in running] == [[(0, 1, old.number)]] * 4
    await bench.load(tiny_models[1])


async def test_drain_first_completes_requests_under_the_old_weights(bench, tiny_models, reference):
    old = await bench.load(tiny_models[1])
    running = [bench.submit(seed=seed, max_tokens=200) for seed in range(4)]
    await bench.a_while()
    switch = asyncio.create_task(bench.load(tiny_models[2], "drain"))
    await asyncio.sleep(0)
    late = bench.submit(seed=9)
    new = await switch
    for sample in [await bench.result(task) for task in running]:
        assert sample.version_spans == [(0, 1, old.number)]
    sample = await bench.result(late)
    assert sample.version_spans == [(0, 1, new.number)]
    assert close(reference(tiny_models[2], PROMPT, sample.response_ids), sample.logprobs)


async def test_a_request_queued_at_a_switch_runs_under_the_new_weights_only(bench, tiny_models, reference):
    await bench.load(tiny_models[1])
    tasks = [bench.submit(seed=seed, max_tokens=100) for seed in range(40)]  # 16 run at a time
    await bench.a_while()
    new = await bench.load(tiny_models[2])
    samples = [await bench.result(task) for task in tasks]
    fresh = [sample for sample in samples if sample.version_spans == [(0, 1, new.number)]]
    assert len(fresh) >= 16
    for sample in fresh:
        assert close(reference(tiny_models[2], PROMPT, sample.response_ids), sample.logprobs)


async def test_the_probe_tells_the_held_weights(bench, tiny_models, reference):
    for folder in tiny_models[1:]:
        await bench.load(folder)
        assert close(reference(folder, PROMPT[:1], PROMPT[1:]), await bench.engine.probe(PROMPT))


async def test_a_probe_waits_for_no_place_in_a_full_engine(bench, tiny_models, reference):
    await bench.load(tiny_models[1])
    tasks = [bench.submit(seed=seed, max_tokens=300) for seed in range(40)]  # 16 run at a time
    await bench.a_while()
    await bench.load(tiny_models[2])
    assert close(reference(tiny_models[2], PROMPT[:1], PROMPT[1:]), await bench.engine.probe(PROMPT))
    assert sum(task.done() for task in tasks) < 16
    status = bench.engine.status()
    assert status.running <= 17
    assert status.waiting > 0
    for task in tasks:
        await bench.result(task)


async def test_a_response_ends_with_its_end_token_or_is_cut(bench, tiny_models):
    await bench.load(tiny_models[1])
    tasks = [bench.submit(seed=seed, max_tokens=30, temperature=2.0) for seed in range(16)]
    samples = [await bench.result(task) for task in tasks]
    for sample in samples:
        ended = sample.response_ids[-1] == 14
        assert sample.finish_reason == ("stop" if ended else "length")
        assert 14 not in sample.response_ids[:-1]
        assert ended or len(sample.response_ids) == 30
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}


async def test_a_stop_token_ends_a_response_and_the_models_end_need_not(bench, tiny_models):
    await bench.load(tiny_models[1])
    whole = (await bench.result(bench.submit(seed=3, max_tokens=40, ignore_eos=True))).response_ids
    assert len(whole) == 40
    token = whole[4]
    sample = await bench.result(bench.submit(seed=3, max_tokens=40, ignore_eos=True, stop_token_ids=[token]))
    assert (sample.response_ids, sample.finish_reason) == (whole[: whole.index(token) + 1], "stop")


async def test_a_stop_text_ends_a_response_and_stays_part_of_it(bench, tiny_models):
    await bench.load(tiny_models[1])
    whole = (await bench.result(bench.submit(seed=3))).response_ids
    text = bench.engine.decode(whole)
    stop = text[4:6]  # two tokens
    sample = await bench.result(bench.submit(seed=3, stop=["never sampled", stop]))
    assert sample.response_ids == whole[: len(sample.response_ids)]
    assert bench.engine.decode(sample.response_ids) == text[: text.index(stop) + len(stop)]
    assert sample.finish_reason == "stop"
    assert len(sample.logprobs) == len(sample.response_ids) < len(whole)


@pytest.mark.parametrize(("stop", "ids"), [("<bos>", [13]), ("<bos><bos>", [13, 13])])
async def test_special_tokens_end_a_response_where_they_are_a_stop_text(bench, tiny_models, stop, ids):
    await bench.load(tiny_models[1])
    whole = (await bench.result(bench.submit(seed=3, max_tokens=100))).response_ids
    end = next(end for end in range(len(whole)) if whole[:end][-len(ids) :] == ids)
    sample = await bench.result(bench.submit(seed=3, max_tokens=100, stop=[stop]))
    assert (sample.response_ids, sample.finish_reason) == (whole[:end], "stop")


async def test_text_leaves_special_tokens_out(bench):
    assert bench.engine.decode([1, 2, 10, 3, 11, 14]) == "12+3="


async def test_validation_may_keep_the_model_from_ending_and_from_repeating_itself(bench, tiny_models):
    await bench.load(tiny_models[0])
    own = await bench.result(bench.submit(temperature=0.0))
    kept = await bench.result(bench.submit(temperature=0.0, min_tokens=40))
    assert (len(kept.response_ids), kept.finish_reason) == (40, "length")
    likeliest = await bench.result(bench.submit(temperature=2.0, min_p=1.0))
    assert likeliest.response_ids == own.response_ids
    varied = await bench.result(bench.submit(temperature=0.0, repetition_penalty=2.0))
    assert varied.response_ids != own.response_ids


@pytest.mark.parametrize("wrong", [-1, 1_000_000])
async def test_a_prompt_with_an_unknown_token_is_refused_and_others_go_on(bench, tiny_models, wrong):
    await bench.load(tiny_models[0])
    other = bench.submit()
    with pytest.raises(RequestRefusedError, match=f"token ids .*{wrong}"):
        await bench.result(bench.submit([1, 2, wrong]))
    assert isinstance(await bench.result(other), FinishedSample)


async def test_a_prompt_longer_than_the_model_is_refused_and_others_go_on(bench, tiny_models):
    await bench.load(tiny_models[1])
    with pytest.raises(RequestRefusedError, match="600 tokens, and a prompt and its response together may have"):
        await bench.result(bench.submit(prompt=[1] * 600))
    with pytest.raises(RequestRefusedError, match="temperature"):
        await bench.result(bench.submit(temperature=9.0))
    assert isinstance(await bench.result(bench.submit()), FinishedSample)


async def queue_seconds_behind_a_full_engine(bench, seeds, *, cancelled):
    """Seconds that a request waits for one of the 16 places, all taken by long responses."""
    long = [bench.submit(seed=seed, max_tokens=300) for seed in seeds]
    await asyncio.sleep(0.01)
    if cancelled:
        for task in long:
            task.cancel()
    sample = await bench.result(bench.submit(seed=99, max_tokens=1))
    await asyncio.wait(long)
    return sample.engine_queue_s


async def test_a_cancelled_request_gives_its_place_in_the_engine_to_others(bench, tiny_models):
    await bench.load(tiny_models[1])
    responses = {seed: bench.submit(seed=seed, max_tokens=300) for seed in range(96)}
    lengths = {seed: len((await bench.result(task)).response_ids) for seed, task in responses.items()}
    seeds = sorted(lengths, key=lengths.__getitem__)[-16:]
    waited = await queue_seconds_behind_a_full_engine(bench, seeds, cancelled=False)
    assert await queue_seconds_behind_a_full_engine(bench, seeds, cancelled=True) < waited / 2


async def test_a_torn_file_beside_whole_ones_is_found_before_the_engine_loads_any(
    bench, tiny_models, tmp_path, reference
):
    tensors = load_file(tiny_models[2] / "model.safetensors")
    files = WeightFiles.plan(shapes_of(tensors, torch.float32), "model.safetensors", 2)
    for rank in range(2):
        files.write_own(tmp_path, rank, ((name, tensors[name]) for name in files.order))
    last = max(tmp_path.glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-64])
    with pytest.raises(WeightsUnreadableError, match=last.name):
        await bench.load(tmp_path)
    for folder in tiny_models[1:]:
        await bench.load(folder)
        assert close(reference(folder, PROMPT[:1], PROMPT[1:]), await bench.engine.probe(PROMPT))


async def test_nothing_is_sampled_after_a_failed_load_until_one_succeeds(bench, tiny_models, tmp_path, reference):
    await bench.load(tiny_models[1])
    with pytest.raises(WeightsUnreadableError):
        await bench.load(tmp_path / "vanished")
    waiting = bench.submit()
    await asyncio.sleep(0.2)
    assert not waiting.done()
    new = await bench.load(tiny_models[2])
    sample = await bench.result(waiting)
    assert sample.version_spans == [(0, 1, new.number)]
    assert close(reference(tiny_models[2], PROMPT, sample.response_ids), sample.logprobs)


class Lent:
    """The session's engine, lent to a worker that would start and close its own."""

    def __init__(self, engine):
        self.generate, self.decode = engine.generate, engine.decode
        self.load_weights, self.probe = engine.load_weights, engine.probe
        self.status = engine.status

    async def start(self):
        return None

    async def close(self):
        return None


@pytest_asyncio.fixture(loop_scope="session")
async def vllm_run(run_class, redis_server, run_name, tmp_path):
    """A run's streams on the session's event loop."""
    transport = await Transport.open(RedisAddress(redis_server.url, redis_server.password), run_name)
    yield await run_class.begin(transport, tmp_path / "weights")
    await transport.close()


async def work_until(bench, run, name, check):
    """Runs a worker on the session's engine until the check returns something."""
    lent = Lent(bench.engine)
    stop = asyncio.Event()
    worker = RolloutWorker(name, run.transport, lent, SingleTurn(), RolloutOptions(drain_grace_s=0.0))
    working = asyncio.create_task(worker.run(stop))
    found = await check()
    stop.set()
    await working
    return found


def publishable(model, folder, reference):
    """Copies a model and writes its probe beside it, as the trainer does."""
    shutil.copytree(model, folder)
    return folder, [*PROMPT], reference(model, PROMPT[:1], PROMPT[1:])


async def test_a_worker_publishes_the_tokens_of_the_engine(
    bench, vllm_run, tiny_models, reference, probe_file, tmp_path
):
    folder, ids, logprobs = publishable(tiny_models[1], tmp_path / "published", reference)
    probe_file(folder, ids, logprobs)
    version = await vllm_run.announce_folder(folder, 3)
    prompt = np.asarray(PROMPT, "<i4").tobytes()
    await vllm_run.admit("t-0-1.0", n=4, prompt_ids=prompt, sampling=Sampling(max_tokens=20))
    group = await work_until(bench, vllm_run, "rollout-0", lambda: vllm_run.published("t-0-1.0", 4))
    for sample in group.samples:
        body = sample.body
        response = np.frombuffer(body.response_ids, "<i4").tolist()
        assert close(reference(folder, PROMPT, response), np.frombuffer(body.logprobs, "<f4"))
        assert body.version_spans == [(0, version.incarnation, 3)]
        assert body.sample.response == bench.engine.decode(response)
        assert body.generation.logprob_mismatch < 1e-4


async def test_a_redelivered_prompt_gives_the_same_samples_in_another_process(bench, vllm_run, tiny_models):
    await vllm_run.announce_folder(tiny_models[1], 0)
    prompt = np.asarray(PROMPT, "<i4").tobytes()
    sampling = Sampling(max_tokens=300)
    for group in ("t-0-1.0", "t-1-1.0"):
        await vllm_run.admit(group, n=6, seed=11, prompt_ids=prompt, sampling=sampling)
    before = await work_until(bench, vllm_run, "rollout-0", lambda: vllm_run.published("t-0-1.0", 1))
    assert any(sample.body is None for sample in before.samples)

    async def both():
        return [await vllm_run.published(group, 6) for group in ("t-0-1.0", "t-1-1.0")]

    interrupted, undisturbed = await work_until(bench, vllm_run, "rollout-1", both)
    for mine, expected in zip(interrupted.samples, undisturbed.samples, strict=True):
        assert mine.body.response_ids == expected.body.response_ids


async def test_a_worker_ends_instead_of_sampling_from_weights_that_are_not_the_trainers(
    bench, vllm_run, tiny_models, reference, probe_file, tmp_path
):
    folder, ids, _ = publishable(tiny_models[1], tmp_path / "published", reference)
    probe_file(folder, ids, reference(tiny_models[2], PROMPT[:1], PROMPT[1:]))
    await vllm_run.announce_folder(folder, 0)
    worker = RolloutWorker("rollout-0", vllm_run.transport, Lent(bench.engine), SingleTurn(), RolloutOptions())
    with pytest.raises(EngineFailedError, match="does not compute with these weights"):
        await asyncio.wait_for(worker.run(asyncio.Event()), 30)
    assert not worker.ready


async def test_no_sample_of_weights_that_the_probe_refuses_is_published(
    bench, vllm_run, tiny_models, reference, probe_file, tmp_path
):
    good, ids, logprobs = publishable(tiny_models[1], tmp_path / "good", reference)
    probe_file(good, ids, logprobs)
    bad = publishable(tiny_models[2], tmp_path / "bad", reference)[0]
    probe_file(bad, ids, logprobs)
    await vllm_run.announce_folder(good, 0)
    prompt, sampling = np.asarray(PROMPT, "<i4").tobytes(), Sampling(max_tokens=200)
    groups = [f"t-{number}-1.0" for number in range(16)]
    for number, group in enumerate(groups):
        await vllm_run.admit(group, n=4, seed=1000 * number, prompt_ids=prompt, sampling=sampling)
    worker = RolloutWorker("rollout-0", vllm_run.transport, Lent(bench.engine), SingleTurn(), RolloutOptions())
    working = asyncio.create_task(worker.run(asyncio.Event()))
    await vllm_run.published(groups[0], 1)
    await vllm_run.announce_folder(bad, 1)
    with pytest.raises(EngineFailedError, match="does not compute with these weights"):
        await asyncio.wait_for(working, 30)
    samples = [sample for group in groups for sample in (await vllm_run.trainer.read(group)).samples]
    spans = [span for sample in samples if sample.body is not None for span in sample.body.version_spans]
    assert {number for _, _, number in spans} == {0}


async def test_a_model_that_is_not_there_is_refused(tmp_path):
    engine = VllmEngine(VllmSettings(str(tmp_path / "absent")))
    with pytest.raises(RefusedError, match="absent"):
        await engine.start()
    await engine.close()


@pytest.mark.parametrize("arguments", [{"no_such_argument": 1}, {"max_model_len": 100_000}])
async def test_arguments_that_the_engine_does_not_take_are_refused(tiny_models, arguments):
    engine = VllmEngine(VllmSettings(str(tiny_models[0]), arguments=arguments))
    with pytest.raises(RefusedError, match=r"spec\.rollout\.engine"):
        await engine.start()
    await engine.close()


async def test_the_engine_reports_its_requests_its_cache_and_the_time_to_the_first_token(bench, tiny_models):
    await bench.load(tiny_models[1])
    await bench.result(bench.submit())  # the figures are of the newest step, which was another test's
    task = bench.submit(max_tokens=200)
    status = bench.engine.status()
    while not (status and status.running) and not task.done():
        await asyncio.sleep(0.001)
        status = bench.engine.status()
    await bench.result(task)
    assert (status.running, status.waiting) == (1, 0)
    assert 0 < status.kv_cache_share <= 1
    assert status.first_token_s > 0


async def test_a_rollout_follows_deltas_and_computes_with_the_weights_of_each_version(
    bench, vllm_run, tiny_models, reference, probe_file, tmp_path
):
    model = load_file(tiny_models[1] / "model.safetensors")
    series = DeltaSeries(tmp_path / "weights", model, dtype=torch.float32)
    following, late = (PolicyWeights(vllm_run.transport, bench.engine, "continue", silent) for _ in range(2))
    for number in range(5):
        announcement = series.publish(PolicyVersion(vllm_run.trainer.incarnation, number), whole=number == 3)
        shutil.copytree(tiny_models[1], whole := tmp_path / f"whole-{number}")
        save_file(model, whole / "model.safetensors", metadata={"format": "pt"})
        probe_file(Path(announcement.path), [*PROMPT], reference(whole, PROMPT[:1], PROMPT[1:]), 1e-3)
        await vllm_run.trainer.announce(announcement)
        assert await following.follow()
        assert following.logprob_mismatch < 1e-4
        sample = await bench.result(bench.submit(seed=number))
        assert close(reference(whole, PROMPT, sample.response_ids), sample.logprobs)
    assert not close(reference(tmp_path / "whole-0", PROMPT, sample.response_ids), sample.logprobs, 1e-2)
    assert await late.follow()
    assert late.logprob_mismatch < 1e-4
    for weights in (following, late):
        await weights.close()


async def silent():
    return None
