"""Publish finished samples without delay, in batches of whatever is finished. Called by ``prompt_work``."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from plaudit_wire.messages import Body, Prompt
from plaudit_workers.stream.connection import Transport
from plaudit_workers.stream.outage import outlasting
from plaudit_workers.stream.worker.lease import Delivery
from plaudit_workers.stream.worker.producer import Publication, publish_many

_LARGEST_BATCH = 64
"""Samples in one pipeline; while it is sent, the next ones queue."""


@dataclass(frozen=True, slots=True)
class _Item:
    delivery: Delivery[Prompt]
    index: int
    body: Body
    answer: asyncio.Future[Publication]


class Publisher:
    """Sends one pipeline at a time, each with all samples that were finished when it began."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._items: asyncio.Queue[_Item] = asyncio.Queue()

    async def publish(self, delivery: Delivery[Prompt], index: int, body: Body) -> Publication:
        """Publish one sample and return the result. During an outage of Redis the sample waits here."""
        answer: asyncio.Future[Publication] = asyncio.get_running_loop().create_future()
        self._items.put_nowait(_Item(delivery, index, body, answer))
        return await answer

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            batch = [await self._items.get()]
            while len(batch) < _LARGEST_BATCH and not self._items.empty():
                batch.append(self._items.get_nowait())
            await self._publish(batch)

    async def _publish(self, batch: list[_Item]) -> None:
        wanted = [item for item in batch if not item.answer.done()]
        triples = [(item.delivery, item.index, item.body) for item in wanted]
        publications = await outlasting(lambda: publish_many(self._transport, triples))
        for item, publication in zip(wanted, publications, strict=True):
            if not item.answer.done():
                item.answer.set_result(publication)
