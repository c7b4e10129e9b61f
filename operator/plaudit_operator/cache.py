"""Trimmed copies of watched objects, by job; a new list replaces all objects of its kind.

Objects are stored as JSON, in a third of the memory of Python dictionaries, and decoded when their job is reconciled.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from plaudit_operator import names
from plaudit_operator.observed import Object, Observed, labels
from plaudit_operator.runtime.kinds import Kind

Key = tuple[str, str]
"""The key of an RLJob: namespace and name."""

_POD_FIELDS = ("phase", "reason", "message", "conditions", "containerStatuses", "initContainerStatuses")
_METADATA_FIELDS = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "labels",
    "annotations",
    "ownerReferences",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
)

_DECODER = msgspec.json.Decoder(dict[str, Any])


class Cache:
    """Objects by kind, namespace and name, and by the job that they belong to. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[Key, bytes] = {}
        self._children: dict[Key, dict[tuple[str, str], bytes]] = defaultdict(dict)

    def replace(self, kind: Kind, items: Iterable[Object], namespace: str = "") -> set[Key]:
        """Replace all objects of a kind; return the keys of the jobs that changed.

        Args:
            kind: of the objects.
            items: the objects that exist.
            namespace: the only one that ``items`` was read from; empty for all.
        """
        kept = [_kept(kind, item) for item in items]  # one at a time: decoding the whole list would take much memory
        with self._lock:
            touched = self._forget(kind, namespace)
            for entry in kept:
                touched |= self._put(kind, *entry)
            return touched

    def update(self, kind: Kind, event: str, item: Object) -> set[Key]:
        """Store one event of a watch; return the keys of the jobs that changed."""
        entry = _kept(kind, item)
        with self._lock:
            return self._drop(kind, *entry[:2]) if event == "DELETED" else self._put(kind, *entry)

    def keys(self) -> list[Key]:
        """Return the keys of all jobs."""
        with self._lock:
            return list(self._jobs)

    def jobs(self) -> list[Object]:
        """Return all RLJobs, without their children."""
        with self._lock:
            kept = list(self._jobs.values())
        return [_DECODER.decode(job) for job in kept]

    def observed(self, key: Key) -> Observed | None:
        """Return the objects of a job; None if the job is unknown."""
        with self._lock:
            kept = self._jobs.get(key)
            if kept is None:
                return None
            kept_children = dict(self._children.get(key, {}))
        job = _DECODER.decode(kept)
        children = {name: _DECODER.decode(child) for name, child in kept_children.items()}
        run = names.run_id(key[1], str(job["metadata"]["uid"]))
        pods = [item for (kind, _), item in children.items() if kind == "Pod"]
        own = tuple(pod for pod in pods if labels(pod).get(names.LABEL_RUN) == run)
        earlier = tuple(pod for pod in pods if labels(pod).get(names.LABEL_RUN) != run)
        others = {name: item for name, item in children.items() if name[0] != "Pod"}
        return Observed(job, others, own, earlier_pods=earlier)

    def pods(self, key: Key) -> list[Object]:
        """Return all pods of the jobs of a name, which may be deleted."""
        with self._lock:
            kept = [child for (kind, _), child in self._children.get(key, {}).items() if kind == "Pod"]
        return [_DECODER.decode(pod) for pod in kept]

    def _put(self, kind: Kind, key: Key | None, name: str, kept: bytes) -> set[Key]:
        if key is None:
            return set()
        if kind.kind == "RLJob":
            self._jobs[key] = kept
        else:
            self._children[key][kind.kind, name] = kept
        return {key}

    def _drop(self, kind: Kind, key: Key | None, name: str) -> set[Key]:
        if key is None:
            return set()
        if kind.kind == "RLJob":
            self._jobs.pop(key, None)
        else:
            self._children[key].pop((kind.kind, name), None)
        if key not in self._jobs and not self._children.get(key):
            self._children.pop(key, None)
        return {key}

    def _forget(self, kind: Kind, namespace: str) -> set[Key]:
        touched: set[Key] = set()
        if kind.kind == "RLJob":
            touched |= {key for key in self._jobs if namespace in ("", key[0])}
            for key in touched:
                del self._jobs[key]
            return touched
        for key, children in self._children.items():
            if namespace not in ("", key[0]):
                continue
            gone = [name for name in children if name[0] == kind.kind]
            for name in gone:
                del children[name]
            if gone:
                touched.add(key)
        return touched


class NamespaceStore:
    """The part of a cache that one watch fills.

    Args:
        cache: holds the objects.
        namespace: the namespace of the watch; empty for all.
    """

    def __init__(self, cache: Cache, namespace: str) -> None:
        self._cache = cache
        self._namespace = namespace

    def replace(self, kind: Kind, items: Iterable[Object]) -> set[Key]:
        """Replace all objects of a kind in the namespace; return the keys of the jobs that changed."""
        return self._cache.replace(kind, items, self._namespace)

    def update(self, kind: Kind, event: str, item: Object) -> set[Key]:
        """Store one event of the watch; return the keys of the jobs that changed."""
        return self._cache.update(kind, event, item)


def _kept(kind: Kind, item: Object) -> tuple[Key | None, str, bytes]:
    """Return the job of an object, its name, and its trimmed JSON."""
    return _job_key(kind, item), item["metadata"]["name"], msgspec.json.encode(trimmed(kind, item))


def _job_key(kind: Kind, item: Object) -> Key | None:
    metadata = item["metadata"]
    name = metadata["name"] if kind.kind == "RLJob" else labels(item).get(names.LABEL_JOB)
    return (metadata["namespace"], name) if name else None


def trimmed(kind: Kind, item: Object) -> Object:
    """Return the fields of an object that the planner reads, with kind and apiVersion, which lists leave out."""
    metadata = {name: item["metadata"][name] for name in _METADATA_FIELDS if name in item["metadata"]}
    head: dict[str, Any] = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata}
    if kind.kind == "Pod":
        status: Mapping[str, Any] = item.get("status") or {}
        return head | {"status": {name: status[name] for name in _POD_FIELDS if name in status}}
    rest = {name: value for name, value in item.items() if name not in ("apiVersion", "kind", "metadata")}
    return head | rest
