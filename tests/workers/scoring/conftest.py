"""What the reward worker's tests share: a transport, a feed of published samples, workers on user files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from builders import make_body, make_prompt
from plaudit_job.spec.rewards import RewardSpec
from plaudit_wire.messages import Prompt, Sampling
from plaudit_wire.redis import RedisAddress
from plaudit_workers.job_start import has_group_scorers
from plaudit_workers.service.build import build_pipeline
from plaudit_workers.service.worker import ScoringOptions, ScoringWorker
from plaudit_workers.stream.calls import StreamLimits
from plaudit_workers.stream.consumer import Consumer, ConsumerOptions, publish
from plaudit_workers.stream.groups import Group
from plaudit_workers.stream.trainer import TrainerStreams
from plaudit_workers.stream.transport import Transport

RunWorker = Callable[..., AbstractAsyncContextManager[ScoringWorker]]


class Feed:
    """Stands where trainer and rollout stand: admits groups, publishes their samples, waits for what comes back."""

    def __init__(self, transport: Transport, reward: RewardSpec, **limits: Any) -> None:
        self.transport = transport
        given = {"max_open_groups": 1000, "has_group_scorers": has_group_scorers(reward), **limits}
        self.trainer = TrainerStreams(transport, StreamLimits(**given))

    async def publish(self, groups: Sequence[Sequence[str]], **about: Any) -> list[str]:
        """Publishes one group for each list of responses; returns the groups' ids."""
        if self.trainer.incarnation == 0:
            await self.trainer.take_over()
        prompts = [self._prompt(i, len(responses), **about) for i, responses in enumerate(groups)]
        for prompt in prompts:
            await self.trainer.admit(prompt)
        by_id = {prompt.group: responses for prompt, responses in zip(prompts, groups, strict=True)}
        options = ConsumerOptions(block_s=0.01)
        async with Consumer[Prompt](self.transport, "prompts", "rollout-0", options) as consumer:
            left = len(prompts)
            while left:
                for delivery in await consumer.take(left):
                    for index, response in enumerate(by_id[delivery.group]):
                        await publish(
                            self.transport, delivery, index, make_body(delivery.payload, index, response, [1])
                        )
                    consumer.finished(delivery)
                    left -= 1
        return [prompt.group for prompt in prompts]

    async def ready(self, count: int) -> dict[str, Group]:
        """The next ``count`` groups that are ready or dropped, by id."""
        groups: dict[str, Group] = {}
        while len(groups) < count:
            groups |= {group.id: group for group in await self.trainer.take_ready(count, 0.2)}
        return groups

    def _prompt(self, position: int, n: int, **about: Any) -> Prompt:
        base: dict[str, Any] = {
            "position": position,
            "sampling": Sampling(max_tokens=16),
            "data_source": "openai/gsm8k",
            "prompt": "how many?",
            "ground_truth": "4",
        }
        return make_prompt(f"t-{position}-1.0", n, **{**base, **about})


@pytest.fixture
def make_feed_on() -> Callable[..., Feed]:
    return lambda transport, reward, **limits: Feed(transport, reward, **limits)


@pytest.fixture
def make_feed(transport: Transport) -> Callable[..., Feed]:
    return lambda reward, **limits: Feed(transport, reward, **limits)


@pytest.fixture
def make_reward(tmp_path: Path) -> Callable[..., RewardSpec]:
    """``spec.reward`` from camelCase fields; ``source`` becomes the file of every python scorer."""

    def make(scorers: list[dict[str, Any]], source: str = "", **fields: Any) -> RewardSpec:
        path = tmp_path / "rewards.py"
        path.write_text(source)
        for scorer in scorers:
            if "function" in scorer:
                scorer["kind"] = "python"
                function, arguments = scorer.pop("function"), scorer.pop("arguments", {})
                scorer["python"] = {"path": str(path), "function": function, "arguments": arguments}
        return RewardSpec.model_validate({"scorers": scorers, **fields}, by_alias=True, by_name=False)

    return make


@pytest.fixture
def run_worker(address: RedisAddress, run_name: str) -> RunWorker:
    """A reward worker of this run, running until the context ends; it then drains."""

    @asynccontextmanager
    async def run(reward: RewardSpec, name: str = "reward-0", **options: Any) -> AsyncIterator[ScoringWorker]:
        transport = await Transport.open(address, run_name)
        pipeline = await build_pipeline(reward, name)
        given = {"consumer": ConsumerOptions(block_s=0.05), **options}
        worker = ScoringWorker(name, transport, pipeline, ScoringOptions(**given))
        stop = asyncio.Event()
        running = asyncio.create_task(worker.run(stop))
        try:
            yield worker
        finally:
            stop.set()
            await running
            await transport.close()

    return run
