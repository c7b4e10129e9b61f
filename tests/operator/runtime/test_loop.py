"""The informer against a server whose watches break; what its cache keeps; the work queue: each key once."""

from __future__ import annotations

import logging
import tracemalloc
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from watched_server import WatchedServer
from world import settled

from plaudit_operator.cache import Cache, Key
from plaudit_operator.names import LABEL_JOB, LABEL_ROLE
from plaudit_operator.runtime.kinds import CHILDREN, CONFIG_MAP, DEPLOYMENT, RLJOB, SERVICE, Kind, kind_of
from plaudit_operator.runtime.kube import error_of
from plaudit_operator.runtime.loop import Informer, WorkQueue


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


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make() -> tuple[WorkQueue[str], Clock]:
    clock = Clock()
    return WorkQueue(clock), clock


def test_a_key_that_is_added_often_is_worked_once():
    queue, _ = make()
    for _ in range(3):
        queue.add("a")
    assert queue.take(0) == "a"
    queue.done("a")
    assert queue.take(0) is None


def test_a_key_that_is_added_during_its_turn_comes_again_and_not_before():
    queue, _ = make()
    queue.add("a")
    queue.take(0)
    queue.add("a")
    assert queue.take(0) is None
    queue.done("a")
    assert queue.take(0) == "a"


def test_later_means_not_before_and_the_earliest_of_several():
    queue, clock = make()
    queue.add_after("a", 10)
    queue.add_after("a", 5)
    queue.add_after("a", 20)
    clock.now = 4.9
    assert queue.take(0) is None
    clock.now = 5.1
    assert queue.take(0) == "a"
    queue.done("a")
    clock.now = 30
    assert queue.take(0) is None


def test_failures_wait_longer_each_time_and_success_forgets_them():
    queue, clock = make()
    queue.add("a")
    pauses = []
    for _ in range(12):
        clock.now += 1000
        assert queue.take(0) == "a"
        pauses.append(queue.failed("a"))
    assert pauses == sorted(pauses)
    assert pauses[-1] == 8
    clock.now += 1000
    queue.take(0)
    queue.done("a")
    queue.add("a")
    queue.take(0)
    assert queue.failed("a") == pauses[0]


def test_a_server_that_asks_to_wait_is_obeyed():
    queue, _ = make()
    queue.add("a")
    queue.take(0)
    assert queue.failed("a", at_least_s=7) == 7


def test_a_closed_queue_ends_its_workers():
    queue, _ = make()
    queue.add("a")
    queue.close()
    assert queue.take() is None


def child(kind: Kind, job: str, role: str, **fields: Any) -> dict[str, Any]:
    labels = {LABEL_JOB: job, LABEL_ROLE: role}
    metadata = {"name": f"{job}-{role}", "namespace": "default", "uid": f"{job}{role}", "labels": labels}
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, **fields}


def test_the_cache_returns_objects_as_they_were_whatever_their_kind_role_and_size():
    cache = Cache()
    owner = {"metadata": {"name": "job", "namespace": "default", "uid": "1"}, "spec": {}}
    cache.update(RLJOB, "ADDED", owner)
    roles = [f"role-{number}" for number in range(150)]  # more than have a sample
    made = [child(DEPLOYMENT, "job", role, spec={"text": role * 10}) for role in roles]
    made += [child(CONFIG_MAP, "job", role, data={"text": role * 9000}) for role in roles[:3]]
    made += [child(SERVICE, "job", "redis"), child(SERVICE, "job", "metrics", spec={"clusterIP": "None"})]
    for each in made:
        cache.update(kind_of(each["kind"]), "ADDED", each)
    observed = cache.observed(Key("default", "job"))
    assert observed is not None
    assert list(observed.children.values()) == made


def test_the_children_of_another_job_take_less_than_a_third_of_their_size():
    cluster, cache = settled().cluster, Cache()
    children = [msgspec.json.encode(item) for kind in CHILDREN for item in cluster.of_kind(kind.kind)]

    def keep(number: int) -> int:
        """Keep the children of a job of another name; return their size."""
        size = 0
        for text in children:
            of_other = text.replace(b"job-", b"job%d-" % number).replace(b'/job":"job"', b'/job":"job%d"' % number)
            item = msgspec.json.decode(of_other)
            cache.update(kind_of(item["kind"]), "ADDED", item)
            size += len(of_other)
        return size

    keep(0)
    tracemalloc.start()
    try:
        size = sum(map(keep, range(1, 31)))
        assert tracemalloc.get_traced_memory()[0] < size / 3
    finally:
        tracemalloc.stop()
