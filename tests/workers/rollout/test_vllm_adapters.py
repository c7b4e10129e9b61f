"""Adapters in vLLM: a sample finishes under the adapter that began it, beside samples of a newer one."""

import asyncio

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2ForCausalLM

from plaudit_wire.messages import PolicyVersion, Sampling
from plaudit_workers.rollout.engine import SampleRequest, WeightsUnreadableError
from plaudit_workers.rollout.vllm_arguments import VllmSettings
from plaudit_workers.rollout.vllm_engine import VllmEngine

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.torch.distributed.reduce_op. is deprecated:FutureWarning"),
]

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 0] * 15


def save_adapter(source, folder, seed):
    torch.manual_seed(seed)
    model = get_peft_model(
        Qwen2ForCausalLM.from_pretrained(source), LoraConfig(r=3, lora_alpha=6, target_modules="all-linear")
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    return folder


async def generate(source, adapters):
    settings = VllmSettings(str(source), lora_rank=3, num_adapters=2, arguments={"kv_cache_memory_bytes": 64 << 20})
    engine = VllmEngine(settings)
    await engine.start()
    try:
        samples = []
        for number, adapter in enumerate(adapters):
            await engine.load_weights(adapter, PolicyVersion(1, number))
            request = SampleRequest(PROMPT, Sampling(max_tokens=400), 1)
            samples.append(asyncio.create_task(engine.generate(request)))
            await asyncio.sleep(0.05)  # long enough to begin, too short to sample all tokens
        finished = [await sample for sample in samples]
        probe = await engine.probe(PROMPT)
        with pytest.raises(WeightsUnreadableError):
            await engine.load_weights(source, PolicyVersion(1, 9))
        return finished, probe
    finally:
        await engine.close()


def test_a_sample_finishes_under_the_adapter_that_began_it(tied_models, reference, tmp_path):
    source = tied_models[0]
    adapters = [save_adapter(source, tmp_path / f"1.{number}", number) for number in range(4)]
    samples, probe = asyncio.run(generate(source, adapters))
    # A sample that had to wait, for room or for a third adapter, begins under the newest.
    versions = [version for sample in samples for _, _, version in sample.version_spans]
    assert len(versions) == len(samples)
    assert len(set(versions)) > 1
    for number, (version, sample) in enumerate(zip(versions, samples, strict=True)):
        assert version >= number
        expected = reference(adapters[version], PROMPT, sample.response_ids)
        assert np.abs(np.asarray(expected) - np.asarray(sample.logprobs)).max() < 1e-4
    assert probe == pytest.approx(reference(adapters[-1], PROMPT[:1], PROMPT[1:]), abs=1e-4)
