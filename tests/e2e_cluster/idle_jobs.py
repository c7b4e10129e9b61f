"""RLJobs whose pods start and then idle: for tests of scheduling."""

from __future__ import annotations

import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

from real_cluster import Cluster, harness
from world import rljob

NAMESPACE = "gangs"
IMAGE = "localhost/idle:1"
GANG = ("trainer", "rollout", "model", "redis")
ENDS = ["/kubectl", "version", "--client"]
ENDS_BADLY_WHEN_STOPPED = ["/kubectl", "proxy"]


def idle(container: str) -> dict[str, Any]:
    """A pod that only starts: one program that stays, one that ends well at once, and the kubelet's own answer."""
    well = {"httpGet": {"host": "127.0.0.1", "port": 10248, "path": "/healthz"}}
    stays: dict[str, Any] = {"name": container, "command": ["/pause"]}
    if container == "trainer":
        stays["command"] = ENDS_BADLY_WHEN_STOPPED
    if container == "redis":
        stays["readinessProbe"] = {"exec": {"command": ENDS}}
    else:
        stays |= {"readinessProbe": well} | (
            {"livenessProbe": well, "startupProbe": well} if container in ("reward", "metrics") else {}
        )
    prepares: list[dict[str, Any]] = [{"name": "prepare", "command": ENDS}]
    if container == "redis":
        prepares = [{"name": "functions", "image": IMAGE, "command": ENDS}]
    elif container == "model":
        prepares = []
    return {"image": IMAGE, "template": {"spec": {"initContainers": prepares, "containers": [stays]}}}


def gang_job(name: str, rollouts: int = 2, **sections: Any) -> dict[str, Any]:
    """A trainer of two pods with a GPU each, rollouts with two GPUs each, Redis; outside: rewards and metrics."""
    spec = {
        "rollout": {"replicas": rollouts, "engine": {"tensorParallelSize": 2}, "pod": idle("rollout")},
        "trainer": {"ranks": 2, "ranksPerPod": 1, "strategy": "fsdp2", "pod": idle("trainer")},
        "transport": {"managed": {"pod": idle("redis"), "storage": "1Gi"}},
        "metrics": {"pod": idle("metrics")},
        "scheduling": {"gang": "native"},
    }
    job = rljob(**{**spec, **sections})
    job["spec"]["reward"]["workers"] = {"replicas": 1, "pod": idle("reward")}
    job["metadata"] = {"name": name, "namespace": NAMESPACE}
    return job


def prepare(cluster: Cluster, folder: Path) -> None:
    """Load the image of idle pods, and create the jobs' namespace and volume.

    Args:
        cluster: with the CRDs.
        folder: for the image's archive.
    """
    programs = [cluster.program(name) for name in ("pause", "kubectl")]
    subprocess.run(harness("image", f"{folder}/idle.tar", IMAGE, *programs), check=True)
    subprocess.run(harness("load", f"{folder}/idle.tar"), check=True)
    cluster.kubectl("create", "namespace", NAMESPACE, check=False)
    claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    metadata = {"name": "shared", "namespace": NAMESPACE}
    cluster.apply({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": claim})


class Jobs:
    """RLJobs of one namespace, as a test sees them."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def make(self, *jobs: dict[str, Any]) -> None:
        """Creates jobs, all at once."""
        done = self.cluster.apply(*jobs)
        assert done.returncode == 0, done.stderr

    def status(self, name: str) -> dict[str, Any]:
        """Return the status of a job."""
        found: dict[str, Any] = self.cluster.get("rlj", name, NAMESPACE).get("status", {})
        return found

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        """Return a condition of a job."""
        return self.cluster.condition("rlj", name, NAMESPACE, kind)

    def pods(self, name: str, *roles: str) -> list[dict[str, Any]]:
        """Return the pods of a job; by default those of its gang."""
        among = f"plaudit.dev/job={name},plaudit.dev/role in ({','.join(roles or GANG)})"
        return self.cluster.pods(NAMESPACE, among)

    def bound(self, name: str, *roles: str) -> int:
        """Return the number of pods that are bound to a node."""
        return sum(bool(pod["spec"].get("nodeName")) for pod in self.pods(name, *roles))

    def until_running(self, name: str) -> float:
        """Wait until all of a job runs; return the seconds waited."""
        began = time.monotonic()
        self.cluster.until(f"{name} runs", lambda: self.status(name).get("phase") == "Running")
        return time.monotonic() - began

    def until_waiting(self, name: str) -> None:
        """Wait until the scheduler reports a gang as unschedulable."""

        def refused() -> bool:
            roles = ("RolloutReady", "TrainerRunning", "TransportReady")
            return any(self.condition(name, role).get("reason") == "Unschedulable" for role in roles)

        self.cluster.until(f"{name} waits", refused)

    def edit(self, name: str, spec: str) -> None:
        """Edit a job as its user would."""
        self.cluster.kubectl(
            "--namespace", NAMESPACE, "patch", "rlj", name, "--type=merge", "-p", f'{{"spec": {spec}}}'
        )

    def delete(self, *names: str) -> None:
        """Delete jobs and wait until their pods are gone."""
        for name in names:
            self.cluster.kubectl("--namespace", NAMESPACE, "delete", "rlj", name, "--ignore-not-found")
            self.cluster.until(f"{name} gone", partial(self.gone, name))

    def gone(self, name: str) -> bool:
        """Return True if no pod of a job is left, of any role."""
        return not self.pods(name, *GANG, "reward", "metrics")
