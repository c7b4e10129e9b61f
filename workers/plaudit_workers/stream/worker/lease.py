"""Track the entries that one consumer works on, and renew their leases.

A lease is renewed every few seconds for as long as the work takes; an entry whose lease has lapsed may be claimed by
others. A consumer that has lost an entry detects it at the next renewal and stops the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from plaudit_wire.logs import get_logger
from plaudit_wire.names import Stream
from plaudit_workers.stream.connection import Transport
from plaudit_workers.stream.delivery import Delivery
from plaudit_workers.stream.transitions import leases as transitions
from plaudit_workers.supervision import set_within

__all__ = ["Delivery", "Leases", "discard"]

logger = get_logger(__name__)

T = TypeVar("T")


async def discard(transport: Transport, delivery: Delivery[Any]) -> bool:
    """Acknowledge and delete an entry whose group is gone or past it; return False while its work is needed."""
    return bool(await transport.scripts.run(transitions.discard(delivery.stream, [delivery])))


class Leases(Generic[T]):
    """Hold the entries that one consumer works on."""

    def __init__(self, transport: Transport, stream: Stream, worker: str) -> None:
        self._transport = transport
        self._stream = stream
        self._worker = worker
        self._noted: set[str] = set()
        self._renewing = asyncio.Lock()
        self._changed = asyncio.Event()
        self.in_work: dict[str, Delivery[T]] = {}

    def add(self, deliveries: Iterable[Delivery[T]]) -> None:
        """Begin work on these deliveries."""
        self.in_work.update((delivery.entry_id, delivery) for delivery in deliveries)

    def remove(self, entry_id: str) -> None:
        """End work on a delivery, whatever its result."""
        self.in_work.pop(entry_id, None)
        self._noted.discard(entry_id)
        self._changed.set()

    async def wait_for_change(self, timeout_s: float) -> None:
        """Wait until work on an entry has ended."""
        await set_within(self._changed, timeout_s)

    async def renew(self, *, even_if_empty: bool = False) -> None:
        """Renew every lease; set ``lost`` of entries that have ended or that another consumer now holds."""
        async with self._renewing:
            held = list(self.in_work.values())
            if not held and not even_if_empty:
                return
            new = [d for d in held if d.index is not None and d.entry_id not in self._noted]
            lost = await self._transport.reads.run(transitions.renew(self._stream, self._worker, held, new))
            self._noted.update(d.entry_id for d in new if d.entry_id in self.in_work)
        for entry in lost:
            self._lose(entry.decode())

    def _lose(self, entry_id: str) -> None:
        delivery = self.in_work.get(entry_id)
        if delivery is None:
            return
        logger.info("lease lost", stream=self._stream, group=delivery.group, index=delivery.index)
        self.remove(entry_id)
        delivery.lost.set()

    async def hand_back(self, deliveries: Iterable[Delivery[T]]) -> None:
        """Hand back entries; the next consumer finds the same count of deliveries as this one did."""
        back = list(deliveries)
        for delivery in back:
            self.remove(delivery.entry_id)
        async with self._renewing:  # a renewal on its way would make the lease new again
            if back:
                await self._transport.scripts.run(transitions.hand_back(self._stream, self._worker, back))
