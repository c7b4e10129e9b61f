"""Hold the objects of one job in the cluster, as plain data, and read single fields of any object.

``Observed`` is the planner's only input.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from plaudit_operator import names

Object = Mapping[str, Any]
NO_SUCH_KIND = "this cluster has no"
"""Prefix of a refusal if the cluster does not serve a child's kind."""

OF_EARLIER_JOB = "of an earlier job of this name"
"""Part of the message about an object that garbage collection has not deleted yet."""
AWAITS_FINALIZER = "waits for its finalizer"
"""Part of the message about an object whose deletion somebody else holds up."""


def delete_command(namespace: str, objects: Iterable[tuple[str, str]]) -> str:
    """Return the command that deletes objects, given by kind and name."""
    listed = " ".join(f"{kind.lower()}/{name}" for kind, name in objects)
    return f"kubectl delete --namespace {namespace} {listed}"


@dataclass(frozen=True)
class Observed:
    """Hold one RLJob and everything that belongs to it."""

    job: Object
    children: Mapping[tuple[str, str], Object] = field(default_factory=dict)
    """Children by kind and name, whoever owns them."""
    pods: tuple[Object, ...] = ()
    """Pods with the job's labels, trimmed to the fields that the planner reads."""
    files: Object | None = None
    """The ConfigMap that ``spec.files`` names; looked up only before admission."""
    services: Mapping[str, str] = field(default_factory=dict)
    """Secrets with the tokens of the RewardServices that its scorers refer to, as far as they exist, by name."""
    progress: Mapping[str, Any] = field(default_factory=dict)
    """``status.progress`` from the metrics service; empty if it was not read or did not respond."""
    refused_pods: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Why the API server refuses the pods of a Job or StatefulSet, by its kind and name."""
    look_for_refusals_after_s: float | None = None
    """Seconds until the events of objects that lack pods are to be read again; None if none lacks pods."""
    earlier_pods: tuple[Object, ...] = ()
    """Pods of earlier jobs of the same name."""
    refusals: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Errors of children that could not be written last time, by kind and name."""
    failures: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Errors of other calls that failed last time and are repeated, by kind and name of the object."""

    @property
    def name(self) -> str:
        """Return the job's name."""
        return str(self.job["metadata"]["name"])

    @property
    def namespace(self) -> str:
        """Return the job's namespace."""
        return str(self.job["metadata"]["namespace"])

    @property
    def uid(self) -> str:
        """Return the job's uid."""
        return str(self.job["metadata"]["uid"])

    @property
    def run_uid(self) -> str:
        """Return the uid that names the job's run and its Secrets."""
        return run_uid(self.job, self.children)

    @property
    def run(self) -> str:
        """Return the id of the run."""
        return names.run_id(self.name, self.run_uid)

    @property
    def status(self) -> Object:
        """Return the status as last reported."""
        return self.job.get("status") or {}

    def condition(self, kind: str) -> Object:
        """Return a condition as last reported; empty if it was not."""
        conditions = self.status.get("conditions") or []
        return next((condition for condition in conditions if condition["type"] == kind), {})

    @property
    def ended(self) -> bool:
        """Return True if the job is complete or has failed; both are final."""
        return holds(self.job, names.ConditionType.COMPLETE, names.ConditionType.FAILED)

    def child(self, kind: str, name: str) -> Object | None:
        """Return a child that this job owns; None if it is missing or has another owner."""
        found = self.children.get((kind, name))
        return found if found is not None and owner_uid(found) == self.uid else None

    def own(self, kind: str) -> Iterator[Object]:
        """Yield the children of a kind that this job owns."""
        return (found for (k, _), found in self.children.items() if k == kind and owner_uid(found) == self.uid)

    def jobs_of(self, role: str) -> list[Object]:
        """Return the Jobs of a role that this job owns."""
        return [job for job in self.own("Job") if labels(job).get(names.LABEL_ROLE) == role]

    def pods_of(self, role: str) -> list[Object]:
        """Return the pods of a role."""
        return [pod for pod in self.pods if labels(pod).get(names.LABEL_ROLE) == role]


def run_uid(job: Object, children: Mapping[tuple[str, str], Object]) -> str:
    """Return the uid that names a job's run: its own, or that of the job whose objects it has adopted."""
    metadata = job["metadata"]
    config = children.get(("ConfigMap", names.job_config(metadata["name"])))
    adopted = recorded_run(config) if config is not None and owner_uid(config) == metadata["uid"] else {}
    return str(adopted.get("uid") or metadata["uid"])


def recorded_run(config: Object) -> dict[str, str]:
    """Return kind and uid of the object that a run began with; empty if that is not recorded, or unreadable."""
    try:
        recorded = json.loads((config.get("data") or {}).get(names.RUN_KEY, "{}"))
    except ValueError:  # somebody edited it, and is told so
        return {}
    return recorded if isinstance(recorded, dict) else {}


def labels(item: Object) -> Mapping[str, str]:
    """Return the labels of an object."""
    return item["metadata"].get("labels") or {}


def annotations_of(item: Object) -> Mapping[str, str]:
    """Return the annotations of an object."""
    return item["metadata"].get("annotations") or {}


def owner_uid(item: Object) -> str:
    """Return the uid of an object's controller; empty if it has none."""
    owners = item["metadata"].get("ownerReferences") or []
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), "")


def attempt_of(item: Object) -> int:
    """Return the number of the attempt, of the trainer or of a rollout, that a Job or a pod belongs to."""
    return int(labels(item).get(names.LABEL_ATTEMPT, "0"))


def seconds(timestamp: str | None) -> float | None:
    """Return a Kubernetes timestamp as seconds since the epoch."""
    return datetime.fromisoformat(timestamp).timestamp() if timestamp else None


def timestamp(now: float) -> str:
    """Return seconds since the epoch as a Kubernetes timestamp."""
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def gpu_seconds(cost: Mapping[str, Any], now: float) -> dict[str, int]:
    """Return the seconds of GPU time of each role until ``now``, from ``status.cost``."""
    since_s = max(0, int(now) - int(seconds(cost.get("countedTime")) or now))
    return {role["name"]: int(role["gpuSeconds"]) + int(role["gpus"]) * since_s for role in cost.get("roles") or []}


def conditions_of(item: Object) -> Sequence[Object]:
    """Return the conditions of an object; none before its controller reported any."""
    return (item.get("status") or {}).get("conditions") or ()


def holds(item: Object, *kinds: str) -> bool:
    """Return True if one of these conditions is true."""
    return any(found["type"] in kinds and found["status"] == "True" for found in conditions_of(item))
