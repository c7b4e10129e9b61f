"""One copy of a model over two pods: vLLM itself, on a CPU, in two processes that meet at an address."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from plaudit_wire.messages import PolicyVersion, Sampling
from plaudit_workers.rollout.engines.protocol import SampleRequest
from plaudit_workers.rollout.engines.vllm_arguments import VllmSettings
from plaudit_workers.rollout.engines.vllm_engine import VllmEngine
from plaudit_workers.rollout.replica import ReplicaMember

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.torch.distributed.reduce_op. is deprecated:FutureWarning"),
]

FOLLOWER = """
import sys
from test_vllm_pods import settings
from plaudit_workers.rollout.engines.vllm_part import VllmPart

if __name__ == "__main__":
    part = VllmPart(settings(sys.argv[1], rank=1))
    part.start()
    part.wait()
"""
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 0] * 15


async def test_two_pods_sample_from_the_whole_model_and_switch_its_weights_between_steps(
    tiny_models, reference, tmp_path
):
    script = tmp_path / "follower.py"
    script.write_text(FOLLOWER)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen([sys.executable, str(script), str(tiny_models[0])], env=environment) as follower:
        engine = VllmEngine(settings(tiny_models[0], rank=0))
        try:
            await engine.start()
            await engine.load_weights(tiny_models[0], PolicyVersion(1, 1))
            running = [asyncio.create_task(engine.generate(request(seed))) for seed in range(4)]
            while not any(task.done() for task in running[:1]):
                await asyncio.sleep(0.1)
                break
            await engine.load_weights(tiny_models[1], PolicyVersion(1, 2))
            for sample in await asyncio.gather(*running):
                old = [end for begin, end, version in spans(sample) if version == 1]
                count = old[0] if old else 0
                expected = reference(tiny_models[0], PROMPT, sample.response_ids)[:count]
                assert np.abs(np.asarray(expected) - np.asarray(sample.logprobs[:count])).max(initial=0) < 1e-4
            sample = await engine.generate(request(9))
            expected = reference(tiny_models[1], PROMPT, sample.response_ids)
            assert np.abs(np.asarray(expected) - np.asarray(sample.logprobs)).max() < 1e-4
        finally:
            await engine.close()
            follower.terminate()


def settings(model, rank):
    """Return an engine of two pods, each with half of the layers."""
    member = ReplicaMember(rank, 2, "127.0.0.1")
    arguments = {"kv_cache_memory_bytes": None}
    return VllmSettings(
        str(model), pipeline_parallel_size=2, member=member, max_concurrent_samples=8, arguments=arguments
    )


def request(seed):
    return SampleRequest(PROMPT, Sampling(max_tokens=200), seed)


def spans(sample):
    starts = [start for start, *_ in sample.version_spans] + [len(sample.response_ids)]
    return [(start, end, span[-1]) for span, start, end in zip(sample.version_spans, starts, starts[1:], strict=True)]
