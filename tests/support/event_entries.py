"""Encode records as entries of the ``events`` stream."""

from __future__ import annotations

import msgspec

from plaudit_metrics.sources.stream import EventRecord
from plaudit_wire.records import GroupRecord, SampleRecord, write_fields


def encode_event(record: EventRecord) -> dict[str, bytes]:
    """Return the fields of a record's entry, as ``decode_event`` reads them.

    Several samples of one group share an entry: merge their fields.
    """
    if not isinstance(record, SampleRecord):
        kind = b"group" if isinstance(record, GroupRecord) else b"step"
        return {"kind": kind, "record": msgspec.msgpack.encode(record)}
    published, ended = write_fields(record)
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
