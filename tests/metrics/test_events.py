"""Entries of the event stream are read whatever else is in them."""

from __future__ import annotations

import msgspec
import pytest

from event_entries import encode_event
from plaudit_metrics.sources.stream import EventRecord, decode_event
from plaudit_wire.records import SampleRecord, StepRecord
from stage_records import build_group, build_sample

SAMPLES = {
    b"kind": b"samples",
    b"group": b"g",
    b"split": b"train",
    b"step": b"0",
    b"data_source": b"",
    b"admitted": b"1",
}
SCORING = b"\x81\xa7outcome\xa6scored"


def as_read(fields: dict[str, bytes]) -> dict[bytes, bytes]:
    return {key.encode(): value for key, value in fields.items()}


def test_every_kind_of_record_comes_back_as_it_was() -> None:
    one = build_sample(generation=1.0, score=2.0, redelivery=0.5, deliveries=2)
    records: list[EventRecord] = [
        one,
        build_group([one]),
        StepRecord(1, 1, 0.0, 1.0, 1, 1, {"step_s": 1.0}, verdict="trainer"),
    ]
    assert [decode_event(as_read(encode_event(record))) for record in records] == [[record] for record in records]


def test_the_samples_of_a_group_come_together() -> None:
    samples = [build_sample(index=index, score=2.0 + index) for index in range(4)]
    fields: dict[str, bytes] = {}
    for each in samples:
        fields |= encode_event(each)
    assert decode_event(as_read(fields)) == samples


def test_unknown_fields_and_members_do_not_stop_the_reader() -> None:
    record: SampleRecord = build_sample(score=1.0)
    fields = as_read(encode_event(record)) | {b"trace": b"00-ab-cd-01"}
    head, _, _ = fields[b"ended:0"].partition(b"\n")
    scoring = msgspec.to_builtins(record.scoring) | {"cost_usd": 0.1}
    fields[b"ended:0"] = head + b"\n" + msgspec.msgpack.encode(scoring)
    assert decode_event(fields) == [record]


def test_a_sample_that_was_never_generated_has_no_generation() -> None:
    submitted = msgspec.structs.replace(build_sample(score=1.0), generation=None)
    stamps = msgspec.structs.replace(submitted.stamps, taken=None, published=None)
    given_up = msgspec.structs.replace(build_sample(outcome="given_up"), generation=None, stamps=stamps)
    for record in (submitted, given_up):
        assert decode_event(as_read(encode_event(record))) == [record]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {b"kind": b"weather"},
        {b"kind": b"group"},
        {b"kind": b"step", b"record": b"\xff\xff"},
        {b"kind": b"samples", b"group": b"g", b"admitted": b"1"},
        SAMPLES | {b"ended:zero": b"- scored - 1 1 -\n" + SCORING},
        SAMPLES | {b"ended:-1": b"- scored - 1 1 -\n" + SCORING},
        SAMPLES | {b"ended:0": b"- scored - 1\n" + SCORING},
        SAMPLES | {b"ended:0": b"- scored - 1 1 -\n\xff"},
    ],
)
def test_a_damaged_or_unknown_entry_is_nothing(fields: dict[bytes, bytes]) -> None:
    assert decode_event(fields) == []


def test_those_entries_are_damaged_by_nothing_else() -> None:
    [record] = decode_event(SAMPLES | {b"ended:0": b"- scored - 1 1 -\n" + SCORING})
    assert isinstance(record, SampleRecord)
