"""The metrics read the keys that the stream protocol writes."""

from __future__ import annotations

from plaudit_metrics.keys import WATCHED_GROUPS, Keys
from plaudit_workers.stream.names import CONSUMER_GROUPS, Names


def test_the_keys_are_those_of_the_stream_protocol() -> None:
    keys, names = Keys("demo-1"), Names("demo-1")
    assert keys.prefix == names.prefix
    for key in ("events", "dead", "state", "counters", "workers", "worker_records"):
        assert getattr(keys, key) == getattr(names, key)
    for stream in WATCHED_GROUPS:
        assert keys.stream(stream) == getattr(names, stream)


def test_the_consumer_groups_are_those_of_the_stream_protocol() -> None:
    assert dict(WATCHED_GROUPS) == dict(CONSUMER_GROUPS)
