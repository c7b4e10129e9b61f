"""Keep trimmed copies of watched objects, by RLJob or RewardService; a new list replaces all objects of its kind.

Objects are stored as JSON, in a third of the memory of Python dictionaries, and decoded when their job is reconciled.
The objects of jobs are alike, so children are compressed by the first one of their kind and role, to a fifth.
"""

from __future__ import annotations

import threading
import zlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from plaudit_operator import names
from plaudit_operator.observed import Object, Observed, labels, run_uid
from plaudit_operator.pod_state import FIRST_DELETION, deletion_requested_at
from plaudit_operator.runtime.kinds import OWNERS, RLJOB, Kind


class Key(NamedTuple):
    """Name an RLJob or RewardService."""

    namespace: str
    name: str
    kind: str = RLJOB.kind


_POD_FIELDS = ("phase", "reason", "message", "conditions", "containerStatuses", "initContainerStatuses")
_METADATA_FIELDS = (
    *("name", "namespace", "uid", "resourceVersion", "generation", "labels", "annotations", "ownerReferences"),
    *("creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "finalizers"),
)
_OWNING = {kind.kind for kind in OWNERS}
_DECODER = msgspec.json.Decoder(dict[str, Any])
_MOST_SAMPLES = 100
"""Of kinds and roles: anybody may label an object. Kept objects begin with the number of theirs, JSON with a brace."""
_WINDOW = 32 << 10
"""Bytes at the end of a sample that zlib looks at."""


class Cache:
    """Hold objects by kind, namespace and name, and by the job that they belong to. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[Key, bytes] = {}
        self._children: dict[tuple[str, str], dict[tuple[str, str], bytes]] = defaultdict(dict)

    def replace(self, kind: Kind, items: Iterable[Object], namespace: str = "") -> set[Key]:
        """Replace all objects of a kind, in a namespace or (empty) in all; return the keys of the jobs that changed."""
        kept = [_kept(kind, item) for item in items]  # one at a time: decoding the whole list would take much memory
        with self._lock:
            touched = self._forget(kind, namespace)
            for entry in kept:
                touched |= self._put(kind, *entry)
            return touched

    def update(self, kind: Kind, event: str, item: Object) -> set[Key]:
        """Store one event of a watch; return the keys of the jobs that changed."""
        key, name, kept = _kept(kind, item)
        with self._lock:
            known = self._known_as(kind, item, key)
            if event == "DELETED":
                return self._drop(kind, known, name)
            moved = self._drop(kind, known, name) if known != key else set()
            if key is not None and kind.kind == "Pod" and "deletionTimestamp" in item["metadata"]:
                before = self._children.get(key[:2], {}).get((kind.kind, name))
                kept = _with_first_deletion(kept, before)
            return moved | self._put(kind, key, name, kept)

    def _known_as(self, kind: Kind, item: Object, key: Key | None) -> Key | None:
        """Return the job to which a changed object belonged: somebody may have taken away the label that says so."""
        namespace, name = item["metadata"]["namespace"], item["metadata"]["name"]
        if kind in OWNERS or (key is not None and (kind.kind, name) in self._children.get(key[:2], {})):
            return key
        # Each object of a job begins with the job's name.
        jobs = [(namespace, name[:place]) for place, character in enumerate(f"{name}-") if character == "-"]
        return next((Key(*job) for job in jobs if (kind.kind, name) in self._children.get(job, {})), key)

    def keys(self) -> list[Key]:
        """Return the keys of all jobs."""
        with self._lock:
            return list(self._jobs)

    def jobs(self, kind: Kind = RLJOB) -> list[Object]:
        """Return all objects of a kind that users create, without their children."""
        with self._lock:
            kept = [job for key, job in self._jobs.items() if key.kind == kind.kind]
        return [_decoded(job) for job in kept]

    def find(self, key: Key) -> Object | None:
        """Return an object that a user created, without its children; None if it does not exist."""
        with self._lock:
            kept = self._jobs.get(key)
        return None if kept is None else _decoded(kept)

    def run_uid(self, key: Key) -> str:
        """Return the uid that names the run of an object that a user created; empty if the object is unknown."""
        config = ("ConfigMap", names.job_config(key.name))
        with self._lock:
            job, kept = self._jobs.get(key), self._children.get(key[:2], {}).get(config)
        children = {} if kept is None else {config: _decoded(kept)}
        return "" if job is None else run_uid(_decoded(job), children)

    def observed(self, key: Key) -> Observed | None:
        """Return the objects of a job; None if the job is unknown."""
        with self._lock:
            kept = self._jobs.get(key)
            if kept is None:
                return None
            kept_children = dict(self._children.get(key[:2], {}))
            others = [self._jobs[each] for each in self._namesakes(key[:2]) if each != key]
        job = _decoded(kept)
        children = {name: _decoded(child) for name, child in kept_children.items()}
        jobs = (job, *map(_decoded, others))
        run, *of_others = (names.run_id(key.name, run_uid(each, children)) for each in jobs)
        pods = [item for (kind, _), item in children.items() if kind == "Pod"]
        own = tuple(pod for pod in pods if labels(pod).get(names.LABEL_RUN) == run)
        earlier = tuple(pod for pod in pods if labels(pod).get(names.LABEL_RUN) not in (run, *of_others))
        without_pods = {name: item for name, item in children.items() if name[0] != "Pod"}
        return Observed(job, without_pods, own, earlier_pods=earlier)

    def pods(self, key: Key) -> list[Object]:
        """Return all pods of the jobs of a name, which may be deleted."""
        with self._lock:
            kept = [child for (kind, _), child in self._children.get(key[:2], {}).items() if kind == "Pod"]
        return [_decoded(pod) for pod in kept]

    def _put(self, kind: Kind, key: Key | None, name: str, kept: bytes) -> set[Key]:
        if key is None:
            return set()
        if kind in OWNERS:
            self._jobs[key] = kept
            return {key}
        self._children[key[:2]][kind.kind, name] = kept
        return self._owners(key)

    def _drop(self, kind: Kind, key: Key | None, name: str) -> set[Key]:
        if key is None:
            return set()
        touched = {key} if kind in OWNERS else self._owners(key)
        if kind in OWNERS:
            self._jobs.pop(key, None)
        else:
            self._children[key[:2]].pop((kind.kind, name), None)
        if not self._namesakes(key[:2]) and not self._children.get(key[:2]):
            self._children.pop(key[:2], None)
        return touched

    def _owners(self, key: Key) -> set[Key]:
        """Return the keys of the objects that a child may belong to; that of a deleted RLJob if there are none."""
        return set(self._namesakes(key[:2])) or {key}

    def _namesakes(self, name: tuple[str, str]) -> list[Key]:
        """Return the keys of an RLJob and a RewardService of this namespace and name, as far as they exist."""
        keys = (Key(*name, kind.kind) for kind in OWNERS)
        return [key for key in keys if key in self._jobs]

    def _forget(self, kind: Kind, namespace: str) -> set[Key]:
        touched: set[Key] = set()
        if kind in OWNERS:
            touched = {key for key in self._jobs if key.kind == kind.kind and namespace in ("", key.namespace)}
            for key in touched:
                del self._jobs[key]
            return touched
        for job, children in self._children.items():
            gone = [name for name in children if name[0] == kind.kind] if namespace in ("", job[0]) else []
            for name in gone:
                del children[name]
            if gone:
                touched |= self._owners(Key(*job))
        return touched


def _kept(kind: Kind, item: Object) -> tuple[Key | None, str, bytes]:
    """Return the job of an object, its name, and its trimmed JSON."""
    namespace, name = item["metadata"]["namespace"], item["metadata"]["name"]
    job = labels(item).get(names.LABEL_JOB)
    key = Key(namespace, name, kind.kind) if kind in OWNERS else Key(namespace, job) if job else None
    return key, name, _encoded(trimmed(kind, item))


class _Samples:
    """Hold the first object of each kind and role, as JSON. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[tuple[str, str], int] = {}
        self._texts: list[bytes] = [b""]

    def compressed(self, item: Object) -> bytes:
        """Return an object in few bytes."""
        text, alike = msgspec.json.encode(item), (item["kind"], labels(item).get(names.LABEL_ROLE, ""))
        with self._lock:
            if alike not in self._numbers and len(self._texts) < _MOST_SAMPLES:
                self._numbers[alike] = len(self._texts)
                self._texts.append(text[-_WINDOW:])
            number = self._numbers.get(alike, 0)
        compressor = zlib.compressobj(level=1, zdict=self._texts[number])
        return bytes([number]) + compressor.compress(text) + compressor.flush()

    def restored(self, kept: bytes) -> bytes:
        """Return the JSON of an object."""
        return zlib.decompressobj(zdict=self._texts[kept[0]]).decompress(kept[1:])


_SAMPLES = _Samples()


def _encoded(item: Object) -> bytes:
    if item["kind"] in _OWNING:  # each scrape of the operator's metrics reads them all
        return msgspec.json.encode(item)
    return _SAMPLES.compressed(item)


def _decoded(kept: bytes) -> dict[str, Any]:
    return _DECODER.decode(kept if kept.startswith(b"{") else _SAMPLES.restored(kept))


def _with_first_deletion(pod: bytes, before: bytes | None) -> bytes:
    """Return a pod that is being deleted, with the time of the first request; ``before`` is the pod as it was."""
    item = _decoded(pod)
    earlier = None if before is None else _decoded(before)
    if earlier is None or earlier["metadata"].get("uid") != item["metadata"].get("uid"):
        earlier = item
    item["metadata"][FIRST_DELETION] = min(filter(None, map(deletion_requested_at, (earlier, item))))
    return _encoded(item)


def trimmed(kind: Kind, item: Object) -> Object:
    """Return the fields of an object that the planner reads, with kind and apiVersion, which lists leave out."""
    metadata = {name: item["metadata"][name] for name in _METADATA_FIELDS if name in item["metadata"]}
    head: dict[str, Any] = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata}
    if kind.kind == "Pod":
        status = item.get("status") or {}
        return head | {"status": {name: status[name] for name in _POD_FIELDS if name in status}}
    return head | {name: value for name, value in item.items() if name not in head}
