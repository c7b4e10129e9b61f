"""The transitions of leases: one typed Python function for each Lua file. Called by ``stream.worker``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from plaudit_wire.names import Stream
from plaudit_workers.stream.delivery import Delivery
from plaudit_workers.stream.transitions.call import Argument, Call, nothing

_NEVER = 1 << 31
_SILENT_MS = 3_600_000
"""A consumer without pending entries is removed after this long without a call."""


@dataclass(frozen=True)
class ClaimRules:
    """Limit the entries that a claim may take.

    Attributes:
        lease_s: claim entries of others that were not renewed for this long; negative: claim none of others.
        look_every_s: one scan of all pending entries in this time serves all consumers; 0: always scan.
        suspect_from: the delivery from which an entry is suspected of ending its workers, and worked on apart.
        most_suspects: suspects that one consumer works on at once; a quarter as many after each further loss.
        poison_limit: after so many deliveries, an entry that is lost in isolation is to blame.
    """

    lease_s: float
    look_every_s: float = 0.0
    suspect_from: int = _NEVER
    most_suspects: int = 1
    poison_limit: int = _NEVER


class ClaimedEntry(NamedTuple):
    """Hold a claimed entry: its id, its deliveries, and True if it is to blame for the loss of its workers."""

    id: str
    deliveries: int
    blamed: bool


@dataclass(frozen=True)
class Claimed:
    """Hold the answer to a claim; payloads are read separately."""

    server_time: float
    entries: list[ClaimedEntry]


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
        expected: the earliest and the latest server time of this call (``ServerTime``); None: any.
    """
    earliest, latest = ("", "") if expected is None else (f"{expected[0]:.6f}", f"{expected[1]:.6f}")
    lease_ms = round(rules.lease_s * 1000) if rules.lease_s >= 0 else -1
    times = (lease_ms, rules.look_every_s, earliest, latest)
    limits = (rules.suspect_from, rules.most_suspects, rules.poison_limit)
    return Call("claim", (stream, consumer, count, *times, *limits, *in_work), _claimed)


def _claimed(answer: list[Any]) -> Claimed:
    return Claimed(float(answer[0]), [ClaimedEntry(entry.decode(), n, bool(blamed)) for entry, n, blamed in answer[1:]])


def isolate(delivery: Delivery[Any]) -> Call[None]:
    """Record that this delivery is now worked on, and nothing else: if its worker is lost, the entry is to blame."""
    return Call("isolate", (delivery.stream, delivery.entry_id, delivery.consumer), nothing, delivery.group)


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
