"""One entry of a stream in the hands of one worker."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from plaudit_wire.names import Stream

T = TypeVar("T")


@dataclass(eq=False)
class Delivery(Generic[T]):
    """One entry of a stream, handed to this process.

    Attributes:
        stream: the stream of the entry.
        entry_id: Redis's id of it.
        payload: its decoded record.
        group: the group it belongs to.
        index: which sample of it; None for an entry that concerns the whole group.
        deliveries: how many workers it was handed to after a lapsed lease, this one and the first included.
        consumer: this worker.
        digest: of the sample's body, in ``samples``.
        taken: monotonic seconds.
        lost: set when the lease went to another worker, or the entry has ended without this one: stop the work.
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
        """Return the monotonic seconds since it was taken."""
        return time.monotonic() - self.taken
