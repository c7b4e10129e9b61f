"""Decode the entries of the ``events`` stream.

Fields: ``kind`` = ``samples`` | ``group`` | ``step``. A group's or step's ``record`` is its msgpack. The samples of a
group share one entry, which a script writes from the group's hash: ``group``, ``split``, ``step``,
``data_source``, ``admitted`` as text; then of each index ``ended:<index>`` and, where it was published,
``published:<index>`` (see ``sample_fields``). Unknown fields are ignored, so that newer writers do not stop an older
reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from plaudit_wire.records import GenerationRecord, GroupRecord, SampleRecord, ScoringRecord, StepRecord
from plaudit_wire.sample_fields import read_fields

EventRecord = SampleRecord | GroupRecord | StepRecord

_GENERATION = msgspec.msgpack.Decoder(GenerationRecord)
_SCORING = msgspec.msgpack.Decoder(ScoringRecord)
_GROUP = msgspec.msgpack.Decoder(GroupRecord)
_STEP = msgspec.msgpack.Decoder(StepRecord)
_MOST_SAMPLES = 1 << 16
"""No group has as many."""
_ENDED = b"ended:"


def decode_event(fields: Mapping[bytes, bytes]) -> Sequence[EventRecord]:
    """Decode one entry; return nothing for an unknown kind or a damaged one (only figures are lost, never a sample)."""
    try:
        match fields.get(b"kind"):
            case b"samples":
                return list(_samples(fields))
            case b"group":
                return [_GROUP.decode(fields[b"record"])]
            case b"step":
                return [_STEP.decode(fields[b"record"])]
            case _:
                return []
    except (msgspec.MsgspecError, KeyError, ValueError):
        return []


def _samples(fields: Mapping[bytes, bytes]) -> Iterator[SampleRecord]:
    group, admitted = fields[b"group"].decode(), float(fields[b"admitted"])
    split: Any = fields[b"split"].decode()
    step, data_source = int(fields[b"step"]), fields[b"data_source"].decode()
    for name, ended in fields.items():
        if not name.startswith(_ENDED):
            continue
        index = int(name[len(_ENDED) :])
        if not 0 <= index < _MOST_SAMPLES:
            raise ValueError(f"index {index} is outside of a group")
        sample = read_fields(admitted, fields.get(b"published:%d" % index), ended)
        yield SampleRecord(
            group=group,
            index=index,
            split=split,
            step=step,
            data_source=data_source,
            stamps=sample.stamps,
            scoring=_SCORING.decode(sample.scoring or b""),
            generation=_GENERATION.decode(sample.generation) if sample.generation else None,
            deliveries=sample.deliveries,
        )
