"""The transitions of every process: one typed Python function for each Lua file. Called by ``stream.connection``."""

from __future__ import annotations

import msgspec

from plaudit_wire.records import WorkerRecord
from plaudit_workers.stream.transitions.call import Call, nothing


def open_streams(*, lost: bool) -> Call[None]:
    """Create the streams' consumer groups that are missing; ``lost``: they existed before."""
    return Call("open_streams", (int(lost),), nothing)


def beat(record: WorkerRecord) -> Call[None]:
    """Record that a process is alive."""
    return Call("beat", (record.worker, msgspec.msgpack.encode(record)), nothing)
