"""An API server in memory with the controllers that a job needs: what the operator's tests run against.

It keeps uids, resourceVersions, owners and preconditions as the real one does, and fails on demand: before a call (the
request is lost) or after it (the answer is lost). The watches' events lie in ``events`` until a test delivers them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import Any

import msgspec

from plaudit_operator import names
from plaudit_operator.observed import annotations_of, labels, owner_uid, timestamp
from plaudit_operator.runtime.kinds import OWNERS as OWNING_KINDS
from plaudit_operator.runtime.kinds import Kind
from plaudit_operator.runtime.kube import AlreadyExistsError, ConflictError, KubeError, NotFoundError

Object = dict[str, Any]
START = 1_780_000_000.0
OWNERS = {kind.kind for kind in OWNING_KINDS}


def copied(item: Any) -> Any:
    """Return a copy as an API server makes it, by way of JSON: a fraction of what copy.deepcopy takes."""
    return msgspec.json.decode(msgspec.json.encode(item))


class Inline(Executor):
    """Runs everything at once, in order."""

    def submit(self, fn, /, *args, **kwargs):
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class ClusterModel:
    """A cluster, with the methods of ``plaudit_operator.runtime.kube.ApiServer``."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.events: dict[str, list[tuple[str, Object]]] = defaultdict(list)
        self._applied: dict[tuple[str, str, str], Object] = {}
        self.now = START
        self.calls: list[str] = []
        self.writes = 0
        self.before: Callable[[str], None] = lambda call: None
        self.after: Callable[[str], None] = lambda call: None
        self._versions = itertools.count(1)
        self._uids = itertools.count(1)

    # What the operator calls

    def list(self, kind: Kind, namespace: str, selector: str, fields: str = "") -> tuple[list[Object], str]:
        items = [copied(o) for (k, _, _), o in self.objects.items() if k == kind.kind]
        if fields:  # of events
            items = [item for item in items if item["reason"] == fields.removeprefix("reason=")]
        wanted = dict(pair.split("=") for pair in selector.split(",") if pair)
        return [item for item in items if wanted.items() <= labels(item).items()], str(next(self._versions))

    def watch(self, *_: Any) -> Iterator[Object]:
        raise NotImplementedError("tests deliver events themselves")

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        with _Call(self, f"get {kind.kind} {name}"):
            return copied(self._find(kind.kind, namespace, name))

    def create(self, manifest: Object) -> Object:
        kind, metadata = manifest["kind"], manifest["metadata"]
        name = metadata.get("name") or f"{metadata['generateName']}{next(self._uids)}"
        with _Call(self, f"create {kind} {name}"):
            if (kind, metadata["namespace"], name) in self.objects:
                raise AlreadyExistsError(f"{kind} {name} exists", 409)
            item = copied(manifest)
            self._applied[kind, metadata["namespace"], name] = copied(manifest)
            item["metadata"] |= {
                "name": name,
                "uid": self._uid(),
                "creationTimestamp": timestamp(self.now),
            }
            item["metadata"]["generation"] = 1
            if kind in ("Deployment", "StatefulSet"):
                item["spec"].setdefault("replicas", 1)
            metadata: Object = self._store("ADDED", item)["metadata"]
            return metadata

    def apply(self, manifest: Object) -> Object:
        kind, metadata = manifest["kind"], manifest["metadata"]
        with _Call(self, f"apply {kind} {metadata['name']}"):
            present = self._find(kind, metadata["namespace"], metadata["name"])
            if metadata.get("uid") not in (None, present["metadata"]["uid"]):
                raise ConflictError("uid", 409)
            known = (kind, metadata["namespace"], metadata["name"])
            kept = _without(present, self._applied.get(known, {}), manifest)
            self._applied[known] = copied(manifest)
            return self._store("MODIFIED", _merged(kept, manifest))

    def patch(self, kind: Kind, namespace: str, name: str, body: Object, subresource: str = "") -> None:
        with _Call(self, f"patch {kind.kind} {name} {subresource}"):
            present = self._find(kind.kind, namespace, name)
            for precondition in ("uid", "resourceVersion"):
                wanted = body.get("metadata", {}).get(precondition)
                if wanted not in (None, present["metadata"][precondition]):
                    raise ConflictError(precondition, 409)
            self._store("MODIFIED", _merge_patch(present, body))

    def scale(self, kind: Kind, namespace: str, name: str, replicas: int) -> None:
        with _Call(self, f"scale {kind.kind} {name} {replicas}"):
            present = copied(self._find(kind.kind, namespace, name))
            present["spec"]["replicas"] = replicas
            self._store("MODIFIED", present)

    def delete(self, kind: Kind, namespace: str, name: str, uid: str, grace_s: int | None = None) -> None:
        try:
            with _Call(self, f"delete {kind.kind} {name}"):
                present = self.objects.get((kind.kind, namespace, name))
                if present is not None and present["metadata"]["uid"] == uid:
                    self.remove(kind.kind, name)
        except KubeError as error:  # as ``ApiServer`` does
            if error.status not in (404, 409):
                raise

    # What a test does to the cluster

    def put(self, item: Object) -> Object:
        """Stores an object as some other client would."""
        item = copied(item)
        item["metadata"].setdefault("uid", self._uid())
        item["metadata"].setdefault("creationTimestamp", timestamp(self.now))
        item["metadata"].setdefault("generation", 1)
        known = (item["kind"], item["metadata"]["namespace"], item["metadata"]["name"]) in self.objects
        return self._store("MODIFIED" if known else "ADDED", item)

    def remove(self, kind: str, name: str) -> None:
        """Delete an object and, in the end, all objects whose last owner it is."""
        for key in [key for key in self.objects if key[0] == kind and key[2] == name]:
            gone = self.objects.pop(key)
            self.events[kind].append(("DELETED", gone))
            for other in [o for o in self.objects.values() if gone["metadata"]["uid"] in _owners(o)]:
                self._collect(other)

    def _collect(self, item: Object) -> None:
        """Delete an object that lost an owner, or only that reference if it has another owner."""
        kind, name = item["kind"], item["metadata"]["name"]
        uids = {o["metadata"]["uid"] for o in self.objects.values()}
        if not uids & _owners(item):
            self.remove(kind, name)
        elif self.find(kind, name):
            self._disown(item, _owners(item) - uids)

    def _disown(self, item: Object, uids: set[str]) -> None:
        left = [owner for owner in item["metadata"]["ownerReferences"] if owner["uid"] not in uids]
        self._store("MODIFIED", {**item, "metadata": {**item["metadata"], "ownerReferences": left}})

    def orphan(self, kind: str, name: str) -> None:
        """Delete as ``kubectl delete --cascade=orphan`` does: what the object owned stays, without its reference."""
        (key,) = (key for key in self.objects if key[0] == kind and key[2] == name)
        gone = self.objects.pop(key)
        self.events[kind].append(("DELETED", gone))
        for child in list(self.objects.values()):
            if gone["metadata"]["uid"] in _owners(child):
                self._disown(child, {gone["metadata"]["uid"]})

    def delete_in_foreground(self, kind: str, name: str) -> None:
        """Delete as ``kubectl delete --cascade=foreground`` does: ``collect_garbage`` takes what it owns before it."""
        began = {"deletionTimestamp": timestamp(self.now), "finalizers": ["foregroundDeletion"]}
        self.edit(kind, name, lambda item: item["metadata"].update(began))

    def collect_garbage(self, most: int = 3) -> None:
        """Delete what has no owner any more, and some of what objects own that are deleted in the foreground."""
        present = {item["metadata"]["uid"]: item for item in self.objects.values()}
        for item in [item for item in self.objects.values() if _owners(item) and not _owners(item) & present.keys()]:
            self.remove(item["kind"], item["metadata"]["name"])
        for uid, owner in present.items():
            if owner["kind"] not in OWNERS or "deletionTimestamp" not in owner["metadata"]:
                continue
            owned = [item for item in self.objects.values() if uid in _owners(item)]
            for item in owned[:most]:
                if _owners(item) == {uid}:
                    self.remove(item["kind"], item["metadata"]["name"])
                else:
                    self._disown(item, {uid})
            if not owned:
                self.remove(owner["kind"], owner["metadata"]["name"])

    def _uid(self) -> str:
        """Return another uid, which differs from all others in its beginning: runs are named by it."""
        return f"{next(self._uids):08x}"[::-1]

    def find(self, kind: str, name: str) -> Object | None:
        """An object, whatever its namespace."""
        return next((o for (k, _, n), o in self.objects.items() if k == kind and n == name), None)

    def of_kind(self, kind: str) -> list[Object]:
        """All objects of a kind by name."""
        return sorted((o for (k, _, _), o in self.objects.items() if k == kind), key=lambda o: o["metadata"]["name"])

    def edit(self, kind: str, name: str, change: Callable[[Object], None]) -> None:
        """Changes an object in place, as a person would."""
        item = copied(self.find(kind, name))
        assert item is not None
        change(item)
        if kind in ("RLJob", "RewardService"):
            item["metadata"]["generation"] += 1
        self._store("MODIFIED", item)

    # Controllers

    def run_controllers(self) -> None:
        """Brings pods to what Deployments, StatefulSets and Jobs say; all of them become ready at once."""
        for owner in self.of_kind("Deployment") + self.of_kind("StatefulSet"):
            count = int(owner["spec"]["replicas"])
            if owner["kind"] == "Deployment" and self._is_rolling(owner, count):
                count += 1
            elif owner["kind"] == "StatefulSet":
                self._replace(pod for pod in self._pods_of(owner) if not self._is_updated(owner, pod))
            ready = self._run_pods(owner, count)
            updated = sum(self._is_updated(owner, pod) for pod in self._pods_of(owner))
            status = {"replicas": count, "readyReplicas": ready, "updatedReplicas": updated}
            status = {k: v for k, v in status.items() if v}
            self._set_status(owner, status | {"observedGeneration": owner["metadata"]["generation"]})
        for job in self.of_kind("Job"):
            self._run_job(job)

    def _is_rolling(self, owner: Object, count: int) -> bool:
        """Removes a pod of an earlier template once there is a running one more; whether such pods are left."""
        self._replace(
            pod
            for pod in self._pods_of(owner)
            if not self._is_updated(owner, pod) and pod["status"].get("phase") != "Running"
        )
        pods = self._pods_of(owner)
        outdated = [pod for pod in pods if not self._is_updated(owner, pod)]
        if outdated and len(pods) > count and all(pod["status"].get("phase") == "Running" for pod in pods):
            self.remove("Pod", outdated.pop()["metadata"]["name"])
        return bool(outdated)

    def _is_updated(self, owner: Object, pod: Object) -> bool:
        template = owner["spec"]["template"]
        return labels(pod) == labels(template) and _images(pod) == _images(template)

    def _replace(self, pods: Iterable[Object]) -> None:
        for pod in list(pods):
            self.remove("Pod", pod["metadata"]["name"])

    def _pods_of(self, owner: Object) -> list[Object]:
        return [pod for pod in self.of_kind("Pod") if owner_uid(pod) == owner["metadata"]["uid"]]

    def schedules(self, pod: Object) -> Object | None:
        """Why the scheduler leaves a pod waiting: its condition; None binds it. For models that say otherwise."""
        return None

    def roles(self) -> set[str]:
        """Roles that have pods."""
        return {labels(pod)[names.LABEL_ROLE] for pod in self.of_kind("Pod")}

    def end_trainer(self, code: int, message: str = "", *, disrupted: bool = False) -> None:
        """The running pods of the trainer end."""
        for pod in self.of_kind("Pod"):
            if labels(pod).get(names.LABEL_ROLE) != "trainer" or pod["status"]["phase"] != "Running":
                continue
            ended = {"exitCode": code, "message": message, "reason": "Error" if code else "Completed"}
            ended["finishedAt"] = timestamp(self.now)
            conditions = [{"type": "DisruptionTarget", "status": "True"}] if disrupted else []
            status = {
                "phase": "Failed" if code else "Succeeded",
                "conditions": conditions,
                "containerStatuses": [{"name": "trainer", "state": {"terminated": ended}, "restartCount": 0}],
            }
            self._set_status(pod, status)

    def _run_job(self, job: Object) -> None:
        pods = [pod for pod in self.of_kind("Pod") if owner_uid(pod) == job["metadata"]["uid"]]
        phases = {pod["status"]["phase"] for pod in pods}
        conditions = (job.get("status") or {}).get("conditions") or []
        if any(c["type"] in ("Failed", "Complete") for c in conditions):
            return
        before = job.get("status") or {}
        if "Failed" in phases or (len(pods) < int(before.get("active", 0)) and not job["spec"].get("suspend")):
            for pod in pods:  # a pod that is gone counts as failed, and all others end with it
                if pod["status"]["phase"] not in ("Failed", "Succeeded"):
                    self.remove("Pod", pod["metadata"]["name"])
            failed = {"conditions": [{"type": "Failed", "status": "True"}], "failed": 1}
            self._set_status(job, failed | {key: before[key] for key in ("startTime",) if key in before})
        elif pods and phases == {"Succeeded"} and len(pods) == job["spec"]["completions"]:
            done = {"conditions": [{"type": "Complete", "status": "True"}], "completionTime": timestamp(self.now)}
            self._set_status(job, done)
        elif job["spec"].get("suspend"):
            for pod in pods:
                self.remove("Pod", pod["metadata"]["name"])
            self._set_status(job, {})
        else:
            self._run_pods(job, job["spec"]["completions"])
            began = before.get("startTime") or timestamp(self.now)
            self._set_status(job, {"active": job["spec"]["completions"], "startTime": began})

    def _run_pods(self, owner: Object, count: int) -> int:
        """As many pods as there should be; how many of them run."""
        pods = [pod for pod in self.of_kind("Pod") if owner_uid(pod) == owner["metadata"]["uid"]]
        if owner["kind"] == "Deployment":
            pods.sort(key=lambda pod: -int(annotations_of(pod).get(names.DELETION_COST, "0")))
        for pod in pods[count:]:
            self.remove("Pod", pod["metadata"]["name"])
        for _ in range(count - len(pods)):
            metadata = copied(owner["spec"]["template"]["metadata"])
            metadata |= {"name": f"{owner['metadata']['name']}-{next(self._uids)}"}
            metadata |= {"namespace": owner["metadata"]["namespace"]}
            metadata["ownerReferences"] = [{"uid": owner["metadata"]["uid"], "controller": True}]
            spec = copied(owner["spec"]["template"]["spec"])
            self.put({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": {}})
        return sum(self._start(pod) for pod in self.of_kind("Pod") if owner_uid(pod) == owner["metadata"]["uid"])

    def _start(self, pod: Object) -> bool:
        """Binds and starts a pod, unless the scheduler leaves it waiting; whether it runs."""
        if pod["status"].get("phase") in (None, "Pending"):
            waits = self.schedules(pod)
            bound = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}]
            status = {"phase": "Pending", "conditions": [waits]} if waits else {"phase": "Running", "conditions": bound}
            self._set_status(pod, status)
            return not waits
        return bool(pod["status"]["phase"] == "Running")

    def _set_status(self, item: Object, status: Object) -> None:
        if (item.get("status") or {}) != status:
            self._store("MODIFIED", {**copied(item), "status": status})

    def _find(self, kind: str, namespace: str, name: str) -> Object:
        if (kind, namespace, name) not in self.objects:
            raise NotFoundError(f"{kind} {name} not found", 404)
        return self.objects[kind, namespace, name]

    def _store(self, event: str, item: Object) -> Object:
        key = item["kind"], item["metadata"]["namespace"], item["metadata"]["name"]
        before = self.objects.get(key)
        if before is not None and {**before, "metadata": 0} == {**item, "metadata": 0}:
            same = {k: v for k, v in item["metadata"].items() if k != "resourceVersion"}
            if same == {k: v for k, v in before["metadata"].items() if k != "resourceVersion"}:
                return copied(before)
        self.writes += 1
        item["metadata"]["resourceVersion"] = str(next(self._versions))
        self.objects[key] = item
        self.events[item["kind"]].append((event, copied(item)))
        return copied(item)


def _images(item: Object) -> list[str]:
    spec = item["spec"]
    return [container["image"] for container in (*spec.get("initContainers", ()), *spec["containers"])]


def _owners(item: Object) -> set[str]:
    return {owner["uid"] for owner in item["metadata"].get("ownerReferences") or []}


class _Call:
    """One call: counted, and failing where a test says so."""

    def __init__(self, model: ClusterModel, call: str) -> None:
        self._model, self._call = model, call

    def __enter__(self) -> None:
        self._model.calls.append(self._call)
        self._model.before(self._call)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._model.after(self._call)


def _without(present: Any, before: Any, manifest: Any) -> Any:
    """Enough of server-side apply: fields that the last manifest had and this one lacks go, except replicas."""
    if not all(isinstance(each, dict) for each in (present, before, manifest)):
        return present
    gone = {key for key in before if key not in manifest and key not in ("replicas", "uid")}
    return {
        key: _without(value, before.get(key), manifest.get(key)) for key, value in present.items() if key not in gone
    }


def _merged(present: Any, manifest: Any) -> Any:
    """Enough of server-side apply: mappings are merged, everything else is replaced."""
    if isinstance(present, dict) and isinstance(manifest, dict):
        return {**present, **{key: _merged(present.get(key), value) for key, value in manifest.items()}}
    return copied(manifest)


def _merge_patch(present: Any, patch: Any) -> Any:
    if not isinstance(present, dict) or not isinstance(patch, dict):
        return copied(patch)
    merged = dict(present)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge_patch(merged.get(key, {}) if isinstance(value, dict) else None, value)
    return merged
