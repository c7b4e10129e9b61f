"""What the stream tests share: a connection, prompts, bodies, scores."""

from __future__ import annotations

from typing import Any

import pytest

from builders import make_body, make_prompt, scored
from plaudit_wire.messages import GroupDelivery, Prompt
from plaudit_wire.records import Sample
from plaudit_workers.stream.calls import Admission, Delivery, Publication, StreamLimits
from plaudit_workers.stream.consumer import Consumer, ConsumerOptions, commit, publish
from plaudit_workers.stream.trainer import TrainerStreams
from plaudit_workers.stream.transport import Transport

PUBLISHED = Publication.published
NO_WAITING: dict[str, Any] = {"block_s": 0.0, "reclaim_every_s": 0.0}


@pytest.fixture
def quick() -> ConsumerOptions:
    """Leases as ever, but nothing waits for work that is not there."""
    return ConsumerOptions(**NO_WAITING)


class Run:
    """One run with a trainer, a rollout and a reward worker, as plain calls."""

    def __init__(self, transport: Transport, options: ConsumerOptions) -> None:
        self.transport = transport
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
        assert await self.trainer.admit(make_prompt(**about)) is Admission.admitted
        [delivery] = await self.prompts.take(1)
        return delivery

    async def published(self, **about: Any) -> list[Delivery[Sample]]:
        """A group, all its samples published and taken by the reward worker."""
        prompt = await self.admitted(**about)
        for index in range(prompt.payload.n):
            assert await publish(self.transport, prompt, index, make_body(prompt.payload, index)) is PUBLISHED
        self.prompts.finished(prompt)
        return await self.samples.take(100)

    async def scored(self, **about: Any) -> str:
        """A group whose samples are all scored; its id."""
        deliveries = await self.published(**about)
        for delivery in deliveries:
            await commit(self.transport, delivery, scored(1.0))
            self.samples.finished(delivery)
        return deliveries[0].group

    def another(self, consumer: Consumer[Any], name: str, **options: Any) -> Consumer[Any]:
        """A second worker on the same stream."""
        return Consumer(self.transport, consumer.stream, name, ConsumerOptions(**{**NO_WAITING, **options}))


@pytest.fixture
async def run(transport: Transport, quick: ConsumerOptions) -> Run:
    return await Run(transport, quick).start()
