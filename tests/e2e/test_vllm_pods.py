"""One copy of a model over two pods: vLLM itself, on a CPU, in two processes that meet at an address."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from plaudit_wire.messages import PolicyVersion, Sampling
from plaudit_workers.rollout.engine import SampleRequest
from plaudit_workers.rollout.vllm_arguments import ReplicaMember, VllmSettings
from plaudit_workers.rollout.vllm_engine import VllmEngine
from tiny_policy import reference_logprobs, save_tiny_model

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.torch.distributed.reduce_op. is deprecated:FutureWarning"),
]

FOLLOWER = """
import sys
from test_vllm_pods import settings
from plaudit_workers.rollout.worker import VllmPart

if __name__ == "__main__":
    part = VllmPart(settings(sys.argv[1], rank=1))
    part.start()
    part.wait()
"""
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 0] * 15


@pytest.fixture
def models(tmp_path):
    """Two versions of one model; its head is tied, so each process of the CPU build has to load it separately."""
    return [save_tiny_model(tmp_path / f"version-{seed}", seed, tied=True) for seed in range(2)]


@pytest.fixture
def follower(models, tmp_path):
    """The process of the second pod."""
    script = tmp_path / "follower.py"
    script.write_text(FOLLOWER)
    folders = (Path(__file__).parent, Path(__file__).parents[1] / "support")
    environment = {**os.environ, "PYTHONPATH": ":".join(map(str, folders))}
    command = [sys.executable, str(script), str(models[0])]
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        yield process
        os.killpg(process.pid, signal.SIGKILL)  # as a pod ends: its worker processes with it


@pytest.mark.usefixtures("follower")
async def test_two_pods_sample_from_the_whole_model_and_switch_its_weights_between_steps(models):
    engine = VllmEngine(settings(models[0], rank=0))
    try:
        await engine.start()
        await engine.load_weights(models[0], PolicyVersion(1, 1))
        running = [asyncio.create_task(engine.generate(request(seed))) for seed in range(4)]
        await asyncio.sleep(0.3)  # long enough to begin, too short for all tokens
        await engine.load_weights(models[1], PolicyVersion(1, 2))
        for sample in await asyncio.gather(*running):
            count = tokens_of_first_weights(sample)
            assert difference(models[0], sample, count) < 1e-4
        sample = await engine.generate(request(9))
        assert difference(models[1], sample, len(sample.response_ids)) < 1e-4
    finally:
        await engine.close()


def settings(model, rank):
    """Return an engine of two pods, each with half of every layer."""
    return VllmSettings(
        str(model),
        tensor_parallel_size=2,
        member=ReplicaMember(rank, 2, "127.0.0.1"),
        max_concurrent_samples=8,
        arguments={"kv_cache_memory_bytes": 64 << 20},
    )


def request(seed):
    return SampleRequest(PROMPT, Sampling(max_tokens=200), seed)


def tokens_of_first_weights(sample):
    """Return the number of tokens that the first weights sampled."""
    return next((start for start, _, version in sample.version_spans if version == 2), len(sample.response_ids))


def difference(model, sample, count):
    """Return how far the log-probabilities of the first tokens are from transformers'."""
    expected = reference_logprobs(model, PROMPT, sample.response_ids)[:count]
    return np.abs(np.asarray(expected) - np.asarray(sample.logprobs[:count])).max(initial=0)
