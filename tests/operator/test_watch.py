"""The informer against a server whose watches break, are compacted and carry garbage."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest
from watched_server import WatchedServer

from plaudit_operator.cache import Cache, Key
from plaudit_operator.runtime.kinds import RLJOB, Kind
from plaudit_operator.runtime.kube import error_of
from plaudit_operator.runtime.loop import Informer


class RecordingCache(Cache):
    """The operator's cache, which also records the versions that it is given of each object."""

    def __init__(self) -> None:
        super().__init__()
        self.versions: dict[str, list[int]] = defaultdict(list)

    def replace(self, kind: Kind, items: Iterable[Any], namespace: str = "") -> set[Key]:
        kept = list(items)
        for item in kept:
            self._record(item)
        return super().replace(kind, kept, namespace)

    def update(self, kind: Kind, event: str, item: Any) -> set[Key]:
        keys = super().update(kind, event, item)
        self._record(item)
        return keys

    def _record(self, item: Any) -> None:
        self.versions[item["metadata"]["name"]].append(int(item["metadata"]["resourceVersion"]))


@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_in_a_thousand_runs_with_faults_the_cache_never_goes_back_and_ends_as_the_server_is(
    first: int, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.CRITICAL)
    for seed in range(first, first + 100):
        server, cache, changed = WatchedServer(seed, changes=40), RecordingCache(), set[Key]()
        informer: Informer[Key] = Informer(server, RLJOB, "", "", cache, changed.update)  # type: ignore[arg-type]
        informer.run(server.stop)
        newest: dict[str, int] = {job["metadata"]["name"]: job["spec"]["number"] for job in cache.jobs()}
        assert newest == {name: item["spec"]["number"] for name, item in server.objects.items()}, seed
        assert all(versions == sorted(versions) for versions in cache.versions.values()), seed
        assert {Key("default", name) for name in newest} <= changed


def test_a_watch_that_breaks_resumes_after_its_last_event_and_not_where_it_began():
    class BreaksOnce:
        asked: list[str]

        def __init__(self) -> None:
            self.asked, self.stop = [], WatchedServer(0, 0).stop

        def list(self, *_: Any) -> tuple[list[Any], str]:
            return [], "100"

        def watch(self, kind: Kind, namespace: str, selector: str, version: str, timeout_s: int) -> Any:
            self.asked.append(version)
            if len(self.asked) > 1:
                self.stop.set()
                return
            for number in (101, 102, 103):
                metadata = {"name": "job", "namespace": "default", "resourceVersion": str(number)}
                yield {"type": "MODIFIED", "object": {"metadata": metadata, "spec": {}}}
            raise error_of(0, "connection reset")

    server = BreaksOnce()
    Informer(server, RLJOB, "", "", Cache(), lambda keys: None).run(server.stop)  # type: ignore[arg-type]
    assert server.asked == ["100", "103"]


def test_a_server_that_was_restored_from_a_backup_is_listed_again():
    error = error_of(504, "Too large resource version: 900, current: 100", "Timeout")
    assert type(error).__name__ == "GoneError"
