"""What one consumer has in work, and how it keeps the leases of that.

A lease is renewed every few seconds whatever the work takes; an entry whose lease was not renewed for longer may be
claimed by others. Who has lost one learns it at the next renewal and drops the work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from plaudit_wire.logs import get_logger
from plaudit_wire.names import Stream
from plaudit_workers.stream.connection import Transport
from plaudit_workers.stream.transitions.scripts import OUTAGE
from plaudit_workers.supervision import set_within

logger = get_logger(__name__)

T = TypeVar("T")


@dataclass(eq=False)
class Delivery(Generic[T]):
    """One entry of a stream, handed to this process.

    Attributes:
        stream: where it was read.
        entry_id: Redis's name of it.
        payload: what it says.
        group: the group it belongs to.
        index: which sample of it; None for an entry that is about the whole group.
        deliveries: how many workers it was handed to after a lapsed lease, this one and the first included.
        consumer: this worker.
        digest: of the sample's body, in ``samples``.
        taken: monotonic seconds.
        lost: set when the lease went to another, or the entry has ended without this worker: drop the work.
    """

    stream: Stream
    entry_id: str
    payload: T
    group: str
    index: int | None
    deliveries: int
    consumer: str
    digest: str = ""
    taken: float = field(default_factory=time.monotonic)
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    def elapsed_s(self) -> float:
        """Monotonic seconds since it was taken."""
        return time.monotonic() - self.taken


async def discard(transport: Transport, delivery: Delivery[Any]) -> bool:
    """Acks and deletes an entry whose work nobody needs any more (its group is gone or past it).

    Returns:
        Whether it did; False while the work is needed.
    """
    about = (delivery.entry_id, delivery.group, "-" if delivery.index is None else delivery.index)
    return bool(await transport.scripts.call("discard", "", delivery.stream, *about))


class Leases(Generic[T]):
    """The entries that one consumer works on."""

    def __init__(self, transport: Transport, stream: Stream, worker: str) -> None:
        self._transport = transport
        self._stream = stream
        self._worker = worker
        self._noted: set[str] = set()
        self._renewing = asyncio.Lock()
        self._changed = asyncio.Event()
        self.in_work: dict[str, Delivery[T]] = {}

    def add(self, deliveries: Iterable[Delivery[T]]) -> None:
        """Work on these begins."""
        self.in_work.update((delivery.entry_id, delivery) for delivery in deliveries)

    def remove(self, entry_id: str) -> None:
        """Work on it has ended, however."""
        self.in_work.pop(entry_id, None)
        self._noted.discard(entry_id)
        self._changed.set()

    async def wait_for_change(self, timeout_s: float) -> None:
        """Until work on an entry has ended."""
        await set_within(self._changed, timeout_s)

    async def renew(self) -> None:
        """Extends every lease; sets ``lost`` of the entries that another consumer holds by now, or that have ended.

        Raises:
            redis.RedisError: Redis is away.
        """
        async with self._renewing:
            held = list(self.in_work.values())
            if not held:
                return
            new = [d for d in held if d.index is not None and d.entry_id not in self._noted]
            notes: list[Any] = [part for d in new for part in (d.group, d.index, f"{d.elapsed_s():.6f}")]
            lost: list[bytes] = await self._transport.reads.call(
                "renew", "", self._stream, self._worker, len(held), *(d.entry_id for d in held), *notes
            )
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

    async def renew_forever(self, every_s: float) -> None:
        """Renews until it is cancelled; an outage of Redis is waited out."""
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.renew()
            except OUTAGE as error:
                logger.warning("cannot renew leases", stream=self._stream, error=str(error))

    async def hand_back(self, deliveries: Iterable[Delivery[T]]) -> None:
        """Gives entries back; whoever takes one finds the count of deliveries that this consumer found."""
        back = list(deliveries)
        for delivery in back:
            self.remove(delivery.entry_id)
        async with self._renewing:  # a renewal on its way would make the lease new again
            about: list[Any] = [
                part
                for d in back
                for part in (d.entry_id, d.group, "-" if d.index is None else d.index, f"{d.elapsed_s():.6f}")
            ]
            if about:
                await self._transport.scripts.call("hand_back", "", self._stream, self._worker, *about)
