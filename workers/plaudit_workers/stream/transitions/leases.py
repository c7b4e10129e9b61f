"""The transitions of leases: one typed Python function for each Lua file. Called by ``stream.worker``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from plaudit_wire.names import Stream
from plaudit_workers.stream.delivery import Delivery
from plaudit_workers.stream.transitions.call import Argument, Call

_SILENT_MS = 3_600_000
"""A consumer without pending entries is removed after this long without a call."""


@dataclass(frozen=True)
class ClaimRules:
    """Limit the entries that a claim may take.

    Attributes:
        lease_s: claim entries of others that were not renewed for this long; negative: claim none of others.
        look_every_s: one scan of all pending entries in this time serves all consumers; 0: always scan.
        alone_from: the delivery from which an entry is worked alone.
        poison_limit: the last delivery of an entry that is worked.
    """

    lease_s: float
    look_every_s: float = 0.0
    alone_from: int = 0
    poison_limit: int = 0


@dataclass(frozen=True)
class Claimed:
    """The answer to a claim.

    Attributes:
        server_time: seconds since the epoch.
        entries: id and deliveries of each entry; their payloads are read separately.
    """

    server_time: float
    entries: list[tuple[str, int]]


def claim(
    stream: Stream,
    consumer: str,
    count: int,
    rules: ClaimRules,
    expected: tuple[float, float] | None,
    in_work: Iterable[str],
) -> Call[Claimed]:
    """Take entries that were delivered before.

    Args:
        stream: the stream of the entries.
        consumer: the consumer that takes them.
        count: the most entries to take.
        rules: limits of the claim.
        expected: the earliest and the latest server time of this call (``ServerTime``); None: any.
        in_work: entries that this consumer works on.
    """
    earliest, latest = ("", "") if expected is None else (f"{expected[0]:.6f}", f"{expected[1]:.6f}")
    lease_ms = round(rules.lease_s * 1000) if rules.lease_s >= 0 else -1
    limits = (lease_ms, rules.look_every_s, earliest, latest, rules.alone_from, rules.poison_limit)
    return Call("claim", (stream, consumer, count, *limits, *in_work), _claimed)


def _claimed(answer: list[Any]) -> Claimed:
    return Claimed(float(answer[0]), [(entry.decode(), deliveries) for entry, deliveries in answer[1:]])


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
    """End entries that are no longer needed; the answer lists them."""
    about: list[Argument] = []
    for d in deliveries:
        about += [d.entry_id, d.group, "-" if d.index is None else d.index]
    return Call("discard", (stream, *about), list)


def forget(stream: Stream, leaving: str = "") -> Call[int]:
    """Remove the names of consumers that are gone, and of ``leaving``; the answer is how many."""
    return Call("forget", (stream, leaving, _SILENT_MS), int)
