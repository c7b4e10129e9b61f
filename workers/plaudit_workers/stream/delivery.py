"""One entry of a stream, delivered to one worker."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from plaudit_wire.names import Stream

T = TypeVar("T")


@dataclass(eq=False)
class Delivery(Generic[T]):
    """Hold one entry of a stream, delivered to this process.

    Attributes:
        index: of the sample in its group; None for an entry that concerns the whole group.
        deliveries: the number of deliveries: the first one, and one for each lapsed lease, including this one.
        blamed: it has lost several workers, the last of which worked on nothing else.
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
    blamed: bool = False
    taken: float = field(default_factory=time.monotonic)
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    def elapsed_s(self) -> float:
        """Return the seconds since it was taken."""
        return time.monotonic() - self.taken
