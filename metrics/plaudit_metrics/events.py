"""The entries of the ``events`` stream: how a record is told from its fields.

Fields: ``kind`` = ``sample`` | ``group`` | ``step``. A group's or step's ``record`` is its msgpack. A sample comes in
parts, since a script joins them: ``group``, ``index``, ``split``, ``step``, ``data_source``, ``deliveries`` as text;
``generation`` and ``scoring`` as msgpack (``generation`` may be absent); its stamps as msgpack in ``stamps`` or, one
text field each, under their names. Unknown fields are ignored, so that newer writers do not stop an older reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from plaudit_metrics.records import (
    GenerationRecord,
    GroupRecord,
    SampleRecord,
    ScoringRecord,
    Stamps,
    StepRecord,
)

EventRecord = SampleRecord | GroupRecord | StepRecord

_GENERATION = msgspec.msgpack.Decoder(GenerationRecord)
_SCORING = msgspec.msgpack.Decoder(ScoringRecord)
_STAMPS = msgspec.msgpack.Decoder(Stamps)
_GROUP = msgspec.msgpack.Decoder(GroupRecord)
_STEP = msgspec.msgpack.Decoder(StepRecord)
_MOST_SAMPLES = 1 << 16
"""No group has so many."""
_STAMP_FIELDS = tuple((name, name.encode()) for name in Stamps.__struct_fields__)


def decode_event(fields: Mapping[bytes, bytes]) -> EventRecord | None:
    """Reads one entry; None when it is of an unknown kind or damaged (a figure is lost, never a sample)."""
    try:
        match fields.get(b"kind"):
            case b"sample":
                return _sample(fields)
            case b"group":
                return _GROUP.decode(fields[b"record"])
            case b"step":
                return _STEP.decode(fields[b"record"])
            case _:
                return None
    except (msgspec.MsgspecError, KeyError, ValueError):
        return None


def encode_event(record: EventRecord) -> dict[str, bytes]:
    """The fields of a record's entry, as ``decode_event`` reads them."""
    if isinstance(record, SampleRecord):
        fields = {
            "kind": b"sample",
            "group": record.group.encode(),
            "index": b"%d" % record.index,
            "split": record.split.encode(),
            "step": b"%d" % record.step,
            "data_source": record.data_source.encode(),
            "deliveries": b"%d" % record.deliveries,
            "stamps": msgspec.msgpack.encode(record.stamps),
            "scoring": msgspec.msgpack.encode(record.scoring),
        }
        if record.generation is not None:
            fields["generation"] = msgspec.msgpack.encode(record.generation)
        return fields
    kind = b"group" if isinstance(record, GroupRecord) else b"step"
    return {"kind": kind, "record": msgspec.msgpack.encode(record)}


def _sample(fields: Mapping[bytes, bytes]) -> SampleRecord:
    index = int(fields[b"index"])
    if not 0 <= index < _MOST_SAMPLES:
        raise ValueError(f"index {index} is none of a group's")
    generation = fields.get(b"generation")
    split: Any = fields.get(b"split", b"train").decode()
    return SampleRecord(
        group=fields[b"group"].decode(),
        index=index,
        split=split,
        step=int(fields.get(b"step", b"0")),
        data_source=fields.get(b"data_source", b"").decode(),
        stamps=_stamps(fields),
        scoring=_SCORING.decode(fields[b"scoring"]),
        generation=_GENERATION.decode(generation) if generation else None,
        deliveries=int(fields.get(b"deliveries", b"1")),
    )


def _stamps(fields: Mapping[bytes, bytes]) -> Stamps:
    encoded = fields.get(b"stamps")
    if encoded:
        return _STAMPS.decode(encoded)
    return Stamps(**{name: float(text) for name, key in _STAMP_FIELDS if (text := fields.get(key))})
