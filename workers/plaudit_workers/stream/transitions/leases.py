"""The transitions of leases: one typed function for each script. Called by ``stream.worker``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from plaudit_wire.names import Stream
from plaudit_workers.stream.transitions.call import Argument, Call
from plaudit_workers.stream.worker.delivery import Delivery

_SILENT_MS = 3_600_000
"""A consumer without pending entries that was silent for so long is removed."""


def claim(stream: Stream, consumer: str, count: int, limits: tuple[int, int, int], in_work: Iterable[str]) -> Call[Any]:
    """Take entries that were delivered before.

    Args:
        stream: where.
        consumer: who takes them.
        count: at most so many.
        limits: lease in milliseconds (-1: leave other consumers' entries alone), the delivery from which an entry is
            worked alone, the poison limit.
        in_work: entries that this consumer works on.
    """
    return Call("claim", (stream, consumer, count, *limits, *in_work), list)


def renew(
    stream: Stream, consumer: str, held: Sequence[Delivery[Any]], new: Sequence[Delivery[Any]]
) -> Call[list[bytes]]:
    """Renew leases; the answer lists the entries that this consumer has lost. ``new``: samples renewed first."""
    notes = (part for d in new for part in (d.group, "-" if d.index is None else d.index, f"{d.elapsed_s():.6f}"))
    return Call("renew", (stream, consumer, len(held), *(d.entry_id for d in held), *notes), list)


def hand_back(stream: Stream, consumer: str, deliveries: Sequence[Delivery[Any]]) -> Call[int]:
    """Give entries back unfinished; the answer is how many."""
    about: list[Argument] = []
    for d in deliveries:
        about += [d.entry_id, d.group, "-" if d.index is None else d.index, f"{d.elapsed_s():.6f}"]
    return Call("hand_back", (stream, consumer, *about), int)


def discard(stream: Stream, deliveries: Sequence[Delivery[Any]]) -> Call[list[bytes]]:
    """End entries that are not needed any more; the answer lists them."""
    about: list[Argument] = []
    for d in deliveries:
        about += [d.entry_id, d.group, "-" if d.index is None else d.index]
    return Call("discard", (stream, *about), list)


def forget(stream: Stream, leaving: str = "") -> Call[int]:
    """Remove the names of consumers that are gone, and of ``leaving``; the answer is how many."""
    return Call("forget", (stream, leaving, _SILENT_MS), int)
