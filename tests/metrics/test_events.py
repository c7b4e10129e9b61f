"""Entries of the event stream are read whatever else is in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from plaudit_metrics.events import EventRecord, decode_event, encode_event
from plaudit_metrics.records import SampleRecord, StepRecord

Build = Callable[..., Any]


def as_read(fields: dict[str, bytes]) -> dict[bytes, bytes]:
    return {key.encode(): value for key, value in fields.items()}


def test_every_kind_of_record_comes_back_as_it_was(sample: Build, group: Build) -> None:
    one = sample(generation=1.0, score=2.0, redelivery=0.5, deliveries=2)
    records: list[EventRecord] = [
        one,
        group([one]),
        StepRecord(1, 1, 0.0, 1.0, 1, 1, {"step_s": 1.0}, verdict="trainer"),
    ]
    assert [decode_event(as_read(encode_event(record))) for record in records] == records


def test_stamps_may_come_as_texts_since_a_script_writes_them(sample: Build) -> None:
    record: SampleRecord = sample(generation=1.25, score=2.5)
    fields = as_read(encode_event(record))
    del fields[b"stamps"]
    for name, value in msgspec.structs.asdict(record.stamps).items():
        fields[name.encode()] = b"" if value is None else repr(value).encode()
    assert decode_event(fields) == record


def test_unknown_fields_and_members_do_not_stop_the_reader(sample: Build) -> None:
    record: SampleRecord = sample(score=1.0)
    fields = as_read(encode_event(record)) | {b"trace": b"00-ab-cd-01"}
    scoring = msgspec.to_builtins(record.scoring) | {"cost_usd": 0.1}
    fields[b"scoring"] = msgspec.msgpack.encode(scoring)
    assert decode_event(fields) == record


def test_a_sample_that_was_never_generated_has_no_generation(sample: Build) -> None:
    record = msgspec.structs.replace(sample(outcome="given_up"), generation=None)
    fields = as_read(encode_event(record))
    assert decode_event(fields) == record
    assert decode_event(fields | {b"generation": b""}) == record


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {b"kind": b"weather"},
        {b"kind": b"group"},
        {b"kind": b"step", b"record": b"\xff\xff"},
        {b"kind": b"sample", b"group": b"g", b"index": b"zero", b"scoring": b""},
        {
            b"kind": b"sample",
            b"group": b"g",
            b"index": b"-1",
            b"scoring": b"\x81\xa7outcome\xa6scored",
            b"admitted": b"1",
        },
    ],
)
def test_a_damaged_or_unknown_entry_is_none(fields: dict[bytes, bytes]) -> None:
    assert decode_event(fields) is None
