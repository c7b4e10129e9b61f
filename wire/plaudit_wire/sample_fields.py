"""Read and write a sample's two values in its group's hash, each a line of text fields, then msgpack.

``published``: call, digest, taken, published, entry; the generation (may be empty). ``ended``: call, outcome, taken,
committed, deliveries, first taken; the scoring. ``-`` stands for a missing field. The transitions write them
(``plaudit_workers/stream/transitions/lua/shared/group.lua``).
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from plaudit_wire.records import SampleRecord, Stamps


class SampleFields(NamedTuple):
    """One sample as its group's hash stores it; msgpack parts stay encoded."""

    stamps: Stamps
    digest: str
    """Digest of its body; empty: it was not published."""
    deliveries: int
    generation: bytes
    """Empty: none."""
    scoring: bytes | None
    """None: it is not terminal."""


def read_fields(admitted: float, published: bytes | None, ended: bytes | None) -> SampleFields:
    """Read the two values of a sample whose group was admitted at ``admitted``; damage raises ``ValueError``."""
    head, _, generation = (published or b"").partition(b"\n")
    _, digest, taken, published_at, _ = head.split() if published else (b"", b"", b"-", b"-", b"")
    head, _, scoring = (ended or b"").partition(b"\n")
    _, _, score_taken, committed, deliveries, first = head.split() if ended else (b"", b"", b"-", b"-", b"1", b"-")
    stamps = Stamps(
        admitted=admitted,
        taken=_time(taken),
        published=_time(published_at),
        score_first_taken=_time(first),
        score_taken=_time(score_taken),
        committed=_time(committed),
    )
    return SampleFields(stamps, digest.decode(), int(deliveries), generation, scoring if ended else None)


def write_fields(record: SampleRecord) -> tuple[bytes | None, bytes]:
    """Return the two values of a terminal sample, as ``read_fields`` reads them; None for an unpublished sample."""
    stamps, scoring = record.stamps, record.scoring
    ended = _words(
        "-", scoring.outcome, stamps.score_taken, stamps.committed, record.deliveries, stamps.score_first_taken
    )
    published = None
    if stamps.published is not None:
        generation = b"" if record.generation is None else msgspec.msgpack.encode(record.generation)
        published = _words("-", "-", stamps.taken, stamps.published, "-") + generation
    return published, ended + msgspec.msgpack.encode(scoring)


def _words(*words: str | float | None) -> bytes:
    return " ".join("-" if word is None else str(word) for word in words).encode() + b"\n"


def _time(word: bytes) -> float | None:
    return None if word == b"-" else float(word)
