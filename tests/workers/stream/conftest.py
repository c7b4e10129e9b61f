"""What the stream tests share: a connection, prompts, bodies, scores."""

from __future__ import annotations

import importlib.util
import struct
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType

import pytest

from plaudit_metrics.records import GenerationRecord, ScoringRecord
from plaudit_reward.sample import Sample
from plaudit_workers.launch.redis_server import RedisServer
from plaudit_workers.stream.connection import RedisAddress, Transport
from plaudit_workers.stream.consumer import ConsumerOptions
from plaudit_workers.stream.records import Body, PolicyVersion, Prompt, Sampling


@pytest.fixture
def address(redis_server: RedisServer) -> RedisAddress:
    return RedisAddress(redis_server.url, redis_server.password)


@pytest.fixture
async def transport(address: RedisAddress, run_name: str) -> AsyncIterator[Transport]:
    transport = await Transport.open(address, run_name)
    yield transport
    async for key in transport.commands.scan_iter(f"plaudit:{{{run_name}}}:*", count=1000):
        await transport.commands.unlink(key)
    await transport.close()


@pytest.fixture
def quick() -> ConsumerOptions:
    """Leases as ever, but nothing waits for work that is not there."""
    return ConsumerOptions(block_s=0.0, reclaim_every_s=0.0)


@pytest.fixture
def make_prompt() -> Callable[..., Prompt]:
    def make(group: str = "t-0-1.0", n: int = 2, **changes: object) -> Prompt:
        about: dict[str, object] = {
            "group": group,
            "position": 0,
            "split": "train",
            "step": 1,
            "n": n,
            "min_version": PolicyVersion(1, 0),
            "seed": 7,
            "sampling": Sampling(max_tokens=8),
            "data_source": "copy",
            "prompt": "copy 12",
            "prompt_ids": struct.pack("<2i", 1, 2),
        }
        return Prompt(**{**about, **changes})  # type: ignore[arg-type]

    return make


@pytest.fixture
def make_body() -> Callable[..., Body]:
    def make(prompt: Prompt, index: int, tokens: tuple[int, ...] = (1, 2, 3), text: str = "12") -> Body:
        return Body(
            response_ids=struct.pack(f"<{len(tokens)}i", *tokens),
            logprobs=struct.pack(f"<{len(tokens)}f", *([-0.5] * len(tokens))),
            loss_mask=bytes([1] * len(tokens)),
            version_spans=[(0, 1, 0)],
            generation=GenerationRecord("rollout-0", 0.1, 2, len(tokens), 0, 0),
            sample=Sample(
                group=prompt.group, index=index, data_source=prompt.data_source, prompt=prompt.prompt, response=text
            ),
        )

    return make


@pytest.fixture
def scored() -> Callable[[float], ScoringRecord]:
    return lambda value: ScoringRecord("scored", value, worker="reward-0")


@pytest.fixture(scope="session")
def protocol_test() -> dict[str, ModuleType]:
    """The miniature run and the machine that drives it, for the tests that need both."""
    modules = {}
    for name in ("world", "machine"):
        spec = importlib.util.spec_from_file_location(f"stream_{name}", Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        modules[name] = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = modules[name]
        spec.loader.exec_module(modules[name])
    return modules
