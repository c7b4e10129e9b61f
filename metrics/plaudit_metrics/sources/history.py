"""Read and write ``steps.jsonl``: one JSON object for each closed step. Only the trainer appends.

An object is flat: the step's own fields (``step``, ``incarnation``, ``opened``, ``closed``, ``num_samples``,
``num_groups``, ``verdict``, ``waits``) beside its figures and labels by the keys of docs/metrics.md. A step that was
repeated after a resume is a second line with a higher incarnation. A reader takes the newest one and skips lines that
a later incarnation rolled back.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from plaudit_wire.records import StepRecord, WaitRecord

FILE_NAME = "steps.jsonl"

_FIELDS = frozenset(StepRecord.__struct_fields__) - {"statistics", "labels"}


def append_step(path: Path, record: StepRecord) -> None:
    """Append one step in one write, flushed to disk. A last line that a crash cut short is ended first.

    Raises:
        OSError: the file cannot be written (no space, no permission).
    """
    line = encode_step(record) + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size > 0 and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        while line:
            line = line[os.write(descriptor, line) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_steps(path: Path) -> list[StepRecord]:
    """Read the surviving steps, oldest first. A missing file holds none; a torn line is skipped."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return surviving(record for line in lines if (record := decode_step(line)) is not None)


def surviving(records: Iterable[StepRecord]) -> list[StepRecord]:
    """Return the newest incarnation of each step, at most one record for each, in the order of the steps.

    A new incarnation that resumes at step ``s`` rolls back everything from ``s`` on: those steps of older incarnations
    no longer count, even before the new one has reached them.
    """
    newest_first = sorted(records, key=lambda record: (-record.incarnation, record.step))
    kept: dict[int, StepRecord] = {}
    first_rolled_back = float("inf")
    incarnation: int | None = None
    for record in newest_first:
        if record.incarnation != incarnation:
            first_rolled_back = min(kept, default=first_rolled_back)
            incarnation = record.incarnation
        if record.step < first_rolled_back:
            kept[record.step] = record
    return [kept[step] for step in sorted(kept)]


def flat_step(record: StepRecord) -> dict[str, Any]:
    """Return the step as one flat dictionary: its own fields, then its labels and figures by their keys."""
    fields = {
        name: msgspec.to_builtins(getattr(record, name)) for name in StepRecord.__struct_fields__ if name in _FIELDS
    }
    return fields | record.labels | dict(sorted(record.statistics.items()))


def encode_step(record: StepRecord) -> bytes:
    """Encode ``flat_step`` as one JSON object, without a line end."""
    return msgspec.json.encode(flat_step(record))


def decode_step(line: bytes) -> StepRecord | None:
    """Decode one line; return None for an incomplete record. Unknown texts are labels, unknown numbers figures."""
    try:
        fields: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
        own = {name: fields.pop(name) for name in _FIELDS if name in fields}
        return StepRecord(
            **own | {"waits": msgspec.convert(own.get("waits", []), list[WaitRecord])},
            statistics={key: float(value) for key, value in fields.items() if isinstance(value, int | float)},
            labels={key: value for key, value in fields.items() if isinstance(value, str)},
        )
    except (msgspec.MsgspecError, TypeError):
        return None
