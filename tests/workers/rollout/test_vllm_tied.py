"""A head that is tied to the embedding, and an engine that is not on the main thread (as in an actor)."""

import asyncio
import threading

import numpy as np
import pytest

from plaudit_wire.messages import PolicyVersion, Sampling
from plaudit_workers.rollout.engines.protocol import SampleRequest
from plaudit_workers.rollout.engines.vllm_arguments import VllmSettings
from plaudit_workers.rollout.engines.vllm_engine import VllmEngine

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.torch.distributed.reduce_op. is deprecated:FutureWarning"),
]

PROMPT = [1, 2, 3, 4, 5]


async def generate(source, weights):
    engine = VllmEngine(VllmSettings(str(source), arguments={"kv_cache_memory_bytes": 64 << 20}))
    await engine.start()
    try:
        await engine.load_weights(weights, PolicyVersion(1, 0))
        return await engine.generate(SampleRequest(PROMPT, Sampling(max_tokens=40), 1))
    finally:
        await engine.close()


def test_a_tied_head_follows_the_weights_also_off_the_main_thread(tied_models, reference) -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(generate(*tied_models))))
    thread.start()
    thread.join()
    (sample,) = found
    expected = reference(tied_models[1], PROMPT, sample.response_ids)
    assert np.abs(np.asarray(expected) - np.asarray(sample.logprobs)).max() < 1e-4
