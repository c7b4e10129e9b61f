"""The door of Redis: an entry that no process of Plaudit wrote ends nobody, and no sample of others is lost."""

from __future__ import annotations

import json

import msgspec
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzzed_house import RUN, House
from outside_values import VALUES
from plaudit_wire.names import Names

NAMES = Names(RUN)
BYTES = st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode())
PACKED = st.builds(
    msgspec.msgpack.encode, st.recursive(st.none() | st.integers(-9, 9) | st.text(), st.lists, max_leaves=6)
)
FIELDS = st.dictionaries(
    st.sampled_from([b"sample", b"record", b"group", b"entry", b"kind", b"record:ref"])
    | st.binary(min_size=1, max_size=8),
    BYTES | PACKED | st.sampled_from([b"t-0-1.0 0 digest", b"t-0-1.0", b"0"]),
    min_size=1,
    max_size=4,
)


@pytest.mark.long
@settings(suppress_health_check=list(HealthCheck))
@given(st.sampled_from([NAMES.samples, NAMES.events, NAMES.prompts]), st.lists(FIELDS, min_size=1, max_size=3))
def test_an_entry_that_cannot_be_read_costs_itself(
    house: House, commands: redis.Redis, stream: str, entries: list[dict[bytes, bytes]]
) -> None:
    with house.holding():
        for fields in entries:
            commands.xadd(stream, fields)
