"""vLLM and the trainer on prompts with images: the same tokens and log-probabilities, before and after an update."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from plaudit_wire.errors import RefusedError
from plaudit_wire.messages import PolicyVersion, Sampling
from plaudit_workers.rollout.engine import RequestRefusedError, SampleRequest
from plaudit_workers.rollout.vllm_arguments import VllmSettings
from plaudit_workers.rollout.vllm_engine import VllmEngine
from plaudit_workers.training.model.batch import TrainingBatch
from plaudit_workers.training.model.policy_model import build_model
from plaudit_workers.training.publish import write_weights
from tiny_vision import noise_image, save_vision_policy
from vision_policy import opened, sequence, vision_job

pytestmark = [
    pytest.mark.engines,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.torch.distributed.reduce_op. is deprecated:FutureWarning"),
]

ENGINE = {"maxModelLength": 512, "maxConcurrentSamples": 16, "arguments": {"kv_cache_memory_bytes": 64 << 20}}


class Both:
    """A trainer and an engine on one run's folder."""

    def __init__(self, folder):
        model = save_vision_policy(folder / "model")
        self.folder = folder
        self.job = vision_job(model, folder, rollout={"sampling": {"maxTokens": 12}, "engine": ENGINE})
        self.images, self.rows = opened(self.job, folder)
        self.policy = build_model(self.job, images=self.images)
        self.engine = VllmEngine(VllmSettings.from_job(self.job), folder)
        self.number = 0

    async def publish(self, switch="continue"):
        """Writes the policy's weights and loads them into the engine."""
        self.number += 1
        version = PolicyVersion(1, self.number)
        path = Path(write_weights(self.policy, self.folder / "weights", version).path)
        await self.engine.load_weights(path, version, switch)

    async def sample(self, row, seed, max_tokens=12):
        """A sequence to train on, and the prompt that vLLM computed."""
        ids = np.frombuffer(row.prompt_ids, "<i4").tolist()
        request = SampleRequest(ids, Sampling(max_tokens=max_tokens), seed, images=row.images)
        done = await asyncio.wait_for(self.engine.generate(request), 60)
        return sequence(self.images, row, done.response_ids, done.logprobs, (-1.0) ** seed), done.prompt_ids

    async def samples(self, copies=4):
        return await asyncio.gather(*(self.sample(row, seed) for row in self.rows for seed in range(copies)))

    def compare(self, sequences):
        """The largest difference of a log-probability, in nats."""
        own = self.policy.logprobs(TrainingBatch(tuple(sequences), 1.0, {}))
        pairs = zip(own, sequences, strict=True)
        return max(float(np.abs(mine - each.behaviour_logprobs).max()) for mine, each in pairs)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def both(tmp_path_factory):
    both = Both(tmp_path_factory.mktemp("both"))
    await both.engine.start()
    await both.publish()
    yield both
    await both.engine.close()


async def test_trainer_and_vllm_agree_before_and_after_an_update(both):
    for _ in range(2):
        found = await both.samples()
        for each, prompt_ids in found:
            assert prompt_ids == (each.prompt_ids.tolist() if each.images else [])
        sequences = [each for each, _ in found]
        assert both.compare(sequences) < 1e-4
        figures = both.policy.update(TrainingBatch(tuple(sequences), 1.0, {}))
        assert figures["actor/skipped_updates"] == 0
        assert both.compare(sequences) > 1e-2  # the update shows: vLLM has to follow it
        await both.publish()


async def test_a_sampled_token_of_an_image_is_text(both):
    found = [each for each, _ in await both.samples(copies=24)]
    seen = [each for each in found if each.images and both.images.token_id in each.response_ids]
    assert seen
    assert both.compare(seen) < 1e-4


@pytest.mark.parametrize("switch", ["continue", "recompute"])
async def test_weights_change_while_responses_to_images_are_sampled(both, switch):
    running = [asyncio.ensure_future(both.sample(row, seed, 300)) for row in both.rows for seed in range(2)]
    await asyncio.sleep(0.1)
    await both.publish(switch)
    again = await both.samples()
    assert both.compare([each for each, _ in again]) < 1e-4
    for each, _ in await asyncio.gather(*running):
        assert both.compare([each]) < 1e-4  # the same weights under another version


async def test_weights_need_no_processor_beside_them(both):
    await both.publish()
    published = both.folder / "weights" / f"1.{both.number}" / "model.safetensors"
    alone = both.folder / "alone"
    alone.mkdir()
    (alone / "model.safetensors").write_bytes(published.read_bytes())
    await both.engine.load_weights(alone, PolicyVersion(2, 0))
    both.rows[3] = replace(both.rows[3], images=(both.images.add(noise_image(77, 200, 90)),))
    assert both.compare([each for each, _ in await both.samples()]) < 1e-4


async def test_a_request_whose_image_is_not_stored_is_refused(both):
    request = SampleRequest([1, both.images.token_id, 2], Sampling(max_tokens=2), 1, images=("0" * 64,))
    with pytest.raises(RequestRefusedError, match=r"an image of the prompt: .* cannot be read"):
        await both.engine.generate(request)


async def test_a_request_with_more_images_than_the_job_allows_is_refused(both):
    digests = both.rows[0].images * 5
    request = SampleRequest([1, *[both.images.token_id] * 5, 2], Sampling(max_tokens=2), 1, images=digests)
    with pytest.raises(RequestRefusedError, match="At most 4 image"):
        await both.engine.generate(request)
    sample, _ = await both.sample(both.rows[0], 1)
    assert both.compare([sample]) < 1e-4


async def test_arguments_that_images_depend_on_cannot_be_set(both):
    engine = ENGINE | {"arguments": {"limit_mm_per_prompt": {"image": 9}}}
    job = vision_job(both.folder / "model", both.folder, rollout={"engine": engine})
    with pytest.raises(RefusedError, match="limit_mm_per_prompt cannot be set"):
        VllmSettings.from_job(job)
