"""The entries of the ``events`` stream: how records are told from their fields.

Fields: ``kind`` = ``samples`` | ``group`` | ``step``. A group's or step's ``record`` is its msgpack. The samples of a
group come together, since a script reports them as its hash holds them: ``group``, ``split``, ``step``,
``data_source``, ``admitted`` as text; then of each index ``ended:<index>`` and, where it was published,
``published:<index>``: words, a line end, and the msgpack of its scoring or generation (which may be absent). Unknown
fields are ignored, so that newer writers do not stop an older reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
_GROUP = msgspec.msgpack.Decoder(GroupRecord)
_STEP = msgspec.msgpack.Decoder(StepRecord)
_MOST_SAMPLES = 1 << 16
"""No group has so many."""
_ENDED = b"ended:"


def decode_event(fields: Mapping[bytes, bytes]) -> Sequence[EventRecord]:
    """Reads one entry; empty when it is of an unknown kind or damaged (figures are lost, never a sample)."""
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


def encode_event(record: EventRecord) -> dict[str, bytes]:
    """The fields of a record's entry, as ``decode_event`` reads them.

    Those of samples of one group, put together, are the entry of all of them.
    """
    if not isinstance(record, SampleRecord):
        kind = b"group" if isinstance(record, GroupRecord) else b"step"
        return {"kind": kind, "record": msgspec.msgpack.encode(record)}
    stamps = record.stamps
    ended = _words(
        "-", record.scoring.outcome, stamps.score_taken, stamps.committed, record.deliveries, stamps.score_first_taken
    )
    fields = {
        "kind": b"samples",
        "group": record.group.encode(),
        "split": record.split.encode(),
        "step": b"%d" % record.step,
        "data_source": record.data_source.encode(),
        "admitted": repr(stamps.admitted).encode(),
        f"ended:{record.index}": ended + msgspec.msgpack.encode(record.scoring),
    }
    if stamps.published is not None:
        published = _words("-", "-", stamps.taken, stamps.published, "-")
        generation = b"" if record.generation is None else msgspec.msgpack.encode(record.generation)
        fields[f"published:{record.index}"] = published + generation
    return fields


def _words(*words: str | float | None) -> bytes:
    return " ".join("-" if word is None else str(word) for word in words).encode() + b"\n"


def _samples(fields: Mapping[bytes, bytes]) -> Iterator[SampleRecord]:
    group, admitted = fields[b"group"].decode(), float(fields[b"admitted"])
    split: Any = fields[b"split"].decode()
    step, data_source = int(fields[b"step"]), fields[b"data_source"].decode()
    for name, ended in fields.items():
        if not name.startswith(_ENDED):
            continue
        index = int(name[len(_ENDED) :])
        if not 0 <= index < _MOST_SAMPLES:
            raise ValueError(f"index {index} is none of a group's")
        head, _, scoring = ended.partition(b"\n")
        _, _, score_taken, committed, deliveries, score_first_taken = head.split()
        taken = published = b"-"
        generation = b""
        if generated := fields.get(b"published:%d" % index):
            head, _, generation = generated.partition(b"\n")
            _, _, taken, published, _ = head.split()
        yield SampleRecord(
            group=group,
            index=index,
            split=split,
            step=step,
            data_source=data_source,
            stamps=Stamps(
                admitted=admitted,
                taken=_time(taken),
                published=_time(published),
                score_first_taken=_time(score_first_taken),
                score_taken=_time(score_taken),
                committed=_time(committed),
            ),
            scoring=_SCORING.decode(scoring),
            generation=_GENERATION.decode(generation) if generation else None,
            deliveries=int(deliveries),
        )


def _time(word: bytes) -> float | None:
    return None if word == b"-" else float(word)
