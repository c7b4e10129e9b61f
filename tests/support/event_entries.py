"""Encode records as entries of the ``events`` stream."""

from __future__ import annotations

import msgspec

from plaudit_metrics.sources.stream import EventRecord
from plaudit_wire.records import GroupRecord, SampleRecord


def encode_event(record: EventRecord) -> dict[str, bytes]:
    """Return the fields of a record's entry, as ``decode_event`` reads them.

    Several samples of one group share an entry: merge their fields.
    """
    if not isinstance(record, SampleRecord):
        kind = b"group" if isinstance(record, GroupRecord) else b"step"
        return {"kind": kind, "record": msgspec.msgpack.encode(record)}
    published, ended = _write_fields(record)
    fields = {
        "kind": b"samples",
        "group": record.group.encode(),
        "split": record.split.encode(),
        "step": b"%d" % record.step,
        "data_source": record.data_source.encode(),
        "admitted": repr(record.stamps.admitted).encode(),
        f"ended:{record.index}": ended,
    }
    if published is not None:
        fields[f"published:{record.index}"] = published
    return fields


def _write_fields(record: SampleRecord) -> tuple[bytes | None, bytes]:
    """Return the two values of a terminal sample, as ``read_fields`` reads them; None for an unpublished sample."""
    stamps, scoring = record.stamps, record.scoring
    ended = _text_line(
        "-", scoring.outcome, stamps.score_taken, stamps.committed, record.deliveries, stamps.score_first_taken
    )
    published = None
    if stamps.published is not None:
        generation = b"" if record.generation is None else msgspec.msgpack.encode(record.generation)
        published = _text_line("-", "-", stamps.taken, stamps.published, "-") + generation
    return published, ended + msgspec.msgpack.encode(scoring)


def _text_line(*words: str | float | None) -> bytes:
    return " ".join("-" if word is None else str(word) for word in words).encode() + b"\n"
