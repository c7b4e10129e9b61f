"""A head that is tied to the embedding, an engine that is not on the main thread (as in an actor), and its end."""

import asyncio
import threading

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from plaudit_wire.messages import PolicyVersion, Sampling
from plaudit_workers.rollout.engine import EngineFailedError, SampleRequest
from plaudit_workers.rollout.vllm_arguments import VllmSettings
from plaudit_workers.rollout.vllm_engine import VllmEngine

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.torch.distributed.reduce_op. is deprecated:FutureWarning"),
]

PROMPT = [1, 2, 3, 4, 5]


async def generate_and_break(source, weights, broken):
    """Returns a sample, and what a load that fails in its middle and a request after it raise."""
    engine = VllmEngine(VllmSettings(str(source), arguments={"kv_cache_memory_bytes": 64 << 20}))
    await engine.start()
    request = SampleRequest(PROMPT, Sampling(max_tokens=40), 1)
    try:
        await engine.load_weights(weights, PolicyVersion(1, 0))
        sample = await engine.generate(request)
        raised = []
        for refused in (engine.load_weights(broken, PolicyVersion(1, 1)), engine.generate(request)):
            with pytest.raises(EngineFailedError) as caught:
                await asyncio.wait_for(refused, 30)
            raised.append(str(caught.value))
        return sample, raised
    finally:
        await engine.close()


@pytest.fixture(scope="module")
def broken(tied_models, tmp_path_factory):
    """Weights of which one, in the middle of the file, has the shape of another model."""
    folder = tmp_path_factory.mktemp("broken")
    tensors = load_file(tied_models[1] / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight"))
    save_file({**tensors, name: tensors[name][:-1].clone()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def found(tied_models, broken):
    """What one engine does off the main thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(generate_and_break(*tied_models, broken))))
    thread.start()
    thread.join()
    return found[0]


def test_a_tied_head_follows_the_weights_also_off_the_main_thread(found, tied_models, reference):
    sample, _ = found
    expected = reference(tied_models[1], PROMPT, sample.response_ids)
    assert np.abs(np.asarray(expected) - np.asarray(sample.logprobs)).max() < 1e-4


def test_a_load_that_fails_in_its_middle_ends_the_engine(found):
    _, (load, request) = found
    assert "failed while it loaded the weights 1.1" in load
    assert request == load
