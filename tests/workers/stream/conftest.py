"""What the stream tests share: a connection, prompts, bodies, scores."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from builders import make_body, make_prompt
from plaudit_wire.messages import GroupDelivery, Prompt, SampleBody
from plaudit_wire.records import Sample, ScoringRecord
from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.stream.calls import Admission, Delivery, Publication, StreamLimits
from plaudit_workers.stream.consumer import Consumer, ConsumerOptions, commit, publish
from plaudit_workers.stream.trainer import TrainerStreams
from plaudit_workers.stream.transport import Transport

PUBLISHED = Publication.published
NO_WAITING: dict[str, Any] = {"block_s": 0.0, "reclaim_every_s": 0.0}


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
    return ConsumerOptions(**NO_WAITING)


class Makers:
    """Prompts, bodies and scores with what a test does not care about filled in."""

    def prompt(self, group: str = "t-0-1.0", n: int = 2, **changes: Any) -> Prompt:
        return make_prompt(group, n, **changes)

    def body(self, prompt: Prompt, index: int, tokens: tuple[int, ...] = (1, 2, 3), text: str = "12") -> SampleBody:
        return make_body(prompt, index, text, tokens)

    def score(self, value: float) -> ScoringRecord:
        return ScoringRecord("scored", value, worker="reward-0")


class Run:
    """One run with a trainer, a rollout and a reward worker, as plain calls."""

    def __init__(self, transport: Transport, options: ConsumerOptions, make: Makers) -> None:
        self.transport = transport
        self.make = make
        self.trainer = TrainerStreams(transport, StreamLimits(max_open_groups=4))
        self.prompts: Consumer[Prompt] = Consumer(transport, "prompts", "rollout-0", options)
        self.samples: Consumer[Sample] = Consumer(transport, "samples", "reward-0", options)
        self.groups: Consumer[GroupDelivery] = Consumer(transport, "groups", "reward-0", options)

    async def start(self, **limits: Any) -> Run:
        """A trainer with these limits takes over."""
        self.trainer = TrainerStreams(self.transport, StreamLimits(**{"max_open_groups": 4, **limits}))
        await self.trainer.take_over()
        return self

    async def admitted(self, **about: Any) -> Delivery[Prompt]:
        """A group, its prompt taken by the rollout."""
        assert await self.trainer.admit(self.make.prompt(**about)) is Admission.admitted
        [delivery] = await self.prompts.take(1)
        return delivery

    async def published(self, **about: Any) -> list[Delivery[Sample]]:
        """A group, all its samples published and taken by the reward worker."""
        prompt = await self.admitted(**about)
        for index in range(prompt.payload.n):
            assert await publish(self.transport, prompt, index, self.make.body(prompt.payload, index)) is PUBLISHED
        self.prompts.finished(prompt)
        return await self.samples.take(100)

    async def scored(self, **about: Any) -> str:
        """A group whose samples are all scored; its id."""
        deliveries = await self.published(**about)
        for delivery in deliveries:
            await commit(self.transport, delivery, self.make.score(1.0))
            self.samples.finished(delivery)
        return deliveries[0].group

    def another(self, consumer: Consumer[Any], name: str, **options: Any) -> Consumer[Any]:
        """A second worker on the same stream."""
        return Consumer(self.transport, consumer.stream, name, ConsumerOptions(**{**NO_WAITING, **options}))


@pytest.fixture
def make() -> Makers:
    return Makers()


@pytest.fixture
async def run(transport: Transport, quick: ConsumerOptions, make: Makers) -> Run:
    return await Run(transport, quick, make).start()
