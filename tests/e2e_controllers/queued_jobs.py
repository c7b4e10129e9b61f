"""RLJobs in a queue of a real Kueue: the queue's quota, jobs whose pods only start, and faults to inject."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from controllers import with_controllers
from idle_jobs import GANG, IMAGE, NAMESPACE, Jobs, gang_job, idle, prepare
from operator_process import OperatorProcess, kubeconfig_of_the_chart
from real_cluster import Cluster

GPU = "nvidia.com/gpu"
GATE = "kueue.x-k8s.io/admission"
QUOTA = 6
GPUS_OF_A_JOB = 5
PODS_OF_A_JOB = 6
_API = "kueue.x-k8s.io/v1beta2"
_SETTLES_WITHIN_S = 180
_SETTLED_FOR_S = 4.0
"""A status that does not show the latest fault yet is older than that by then."""


def create_queue(cluster: Cluster) -> None:
    """Create a queue with a quota of GPUs in which a job of higher priority preempts others."""
    quotas = {"cpu": "1000", "memory": "10Ti", GPU: QUOTA}
    resources = [{"name": name, "nominalQuota": quota} for name, quota in quotas.items()]
    group = {"coveredResources": list(quotas), "flavors": [{"name": "any", "resources": resources}]}
    preemption = {"withinClusterQueue": "LowerPriority"}
    queue = {"namespaceSelector": {}, "resourceGroups": [group], "preemption": preemption}
    manifests: list[dict[str, Any]] = [
        {"apiVersion": _API, "kind": "ResourceFlavor", "metadata": {"name": "any"}},
        {"apiVersion": _API, "kind": "ClusterQueue", "metadata": {"name": "team"}, "spec": queue},
        {"apiVersion": _API, "kind": "WorkloadPriorityClass", "metadata": {"name": "urgent"}, "value": 1000},
        {
            "apiVersion": _API,
            "kind": "LocalQueue",
            "metadata": {"name": "team", "namespace": NAMESPACE},
            "spec": {"clusterQueue": "team"},
        },
    ]
    cluster.until("a queue", lambda: cluster.apply(*manifests).returncode == 0, 60)  # its webhooks take a moment


def queued_job(name: str, priority: str = "", *, ends: bool = False) -> dict[str, Any]:
    """Return a job of five GPUs: two ranks, two rollouts and a reward model. With ``ends`` its trainer is soon done."""
    job = gang_job(name, scheduling={"queueName": "team"})
    spec = job["spec"]
    spec["rollout"]["engine"] = {"tensorParallelSize": 1}
    model: dict[str, Any] = {"source": "/plaudit/rm", "pod": idle("model")}
    scorers = [*spec["reward"]["scorers"], {"name": "rm", "kind": "model", "model": model}]
    spec["reward"] = {**spec["reward"], "scorers": scorers}
    if ends:
        spec["trainer"]["pod"]["template"]["spec"]["containers"][0]["command"] = ["/kubectl", "version", "--client"]
    if priority:
        for section in (spec["rollout"], spec["trainer"], model, spec["transport"]["managed"]):
            section["pod"]["template"]["metadata"] = {"labels": {"kueue.x-k8s.io/priority-class": priority}}
    return job


class QueuedJobs(Jobs):
    """Jobs in the queue, with an operator of their own that tests may kill."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        super().__init__(cluster)
        self._kubeconfig = kubeconfig_of_the_chart(cluster, folder)
        self._log = folder / "log"
        self._starts = 0
        self.start_operator()

    def start_operator(self) -> None:
        """Start the operator, and wait until it leads."""
        self._starts += 1
        self.operator = OperatorProcess(self._kubeconfig, f"queues-{self._starts}", NAMESPACE, self._log)
        self.cluster.until("a leader", lambda: self.operator.leads, 60)

    def reserved(self) -> int:
        """Return the GPUs of the queue's quota that admitted jobs hold."""
        flavors = self.cluster.get("clusterqueue", "team").get("status", {}).get("flavorsReservation") or []
        return sum(int(each["total"]) for flavor in flavors for each in flavor["resources"] if each["name"] == GPU)

    def gated(self, name: str) -> int:
        """Return the number of pods of a job that its queue holds back."""
        return sum({"name": GATE} in pod["spec"].get("schedulingGates", []) for pod in self.pods(name))

    def delete_all(self) -> None:
        """Delete all jobs, and wait until their pods are gone."""
        jobs = self.cluster.get("rlj", "", NAMESPACE).get("items", [])
        self.delete(*(job["metadata"]["name"] for job in jobs))

    def arrange(self, runs: str, waits: str) -> None:
        """Let one job run and another wait behind it; a test may also begin where none ran before."""
        if self.status(runs).get("phase") != "Running":
            self.delete_all()
            self.make(queued_job(runs))
            self.until_running(runs)
        if not self.pods(waits):
            self.make(queued_job(waits))
        self.until_queued(waits)

    def until_queued(self, name: str) -> None:
        """Wait until the whole job waits in its queue and holds nothing."""
        queued = lambda: self.condition(name, "Suspended").get("reason") == "Queued"  # noqa: E731
        self.cluster.until(f"{name} queued", queued, _SETTLES_WITHIN_S)
        self.cluster.until(f"{name} gated", lambda: self.gated(name) == PODS_OF_A_JOB, _SETTLES_WITHIN_S)
        self.cluster.until("no reward workers", lambda: not self.pods(name, "reward"), 90)
        assert self.bound(name) == 0

    def is_whole(self, name: str) -> bool:
        """Return True if all pods of a job run and the operator reports it."""
        pods = self.pods(name)
        running = [
            p for p in pods if p["status"].get("phase") == "Running" and "deletionTimestamp" not in p["metadata"]
        ]
        return len(running) == len(pods) == PODS_OF_A_JOB and self.status(name).get("phase") == "Running"

    def until_whole(self, name: str) -> float:
        """Wait until a job is whole and stays so for some looks; return the seconds until then."""
        began, since = time.monotonic(), 0.0

        def settled() -> bool:
            nonlocal since
            since = (since or time.monotonic()) if self.is_whole(name) else 0.0
            return since > 0 and time.monotonic() - since > _SETTLED_FOR_S

        self.cluster.until(f"{name} whole", settled, _SETTLES_WITHIN_S)
        return since - began

    def delete_pod(self, name: str, role: str, *options: str) -> None:
        """Delete a pod of a role, and wait until another has its place."""
        pod = self.pods(name, role)[0]["metadata"]
        self.kubectl("delete", "pod", pod["name"], "--wait=false", *options)
        gone = lambda: pod["uid"] not in {each["metadata"]["uid"] for each in self.pods(name)}  # noqa: E731
        self.cluster.until(f"{pod['name']} gone", gone, 90)

    def kubectl(self, *arguments: str) -> None:
        """Run kubectl in the jobs' namespace."""
        self.cluster.kubectl("--namespace", NAMESPACE, *arguments)


@contextmanager
def jobs_in_a_queue(cluster: Cluster, folder: Path, *controllers: str) -> Iterator[QueuedJobs]:
    """Yield a namespace with Kueue's queue ``team``, an operator of its own, and further controllers beside Kueue."""
    if not cluster.own:
        pytest.skip("needs a cluster whose GPUs nobody else uses")
    prepare(cluster, folder)
    with_controllers(cluster, *controllers, "kueue")
    create_queue(cluster)
    jobs = QueuedJobs(cluster, folder)
    yield jobs
    jobs.delete_all()
    jobs.operator.stop()
    for kind in ("localqueue", "clusterqueue", "resourceflavor"):
        cluster.kubectl("--namespace", NAMESPACE, "delete", kind, "--all", check=False)


class Faults:
    """Faults of a job in a queue, drawn at random.

    Args:
        jobs: the jobs of the cluster.
        seed: of the draw.
    """

    def __init__(self, jobs: QueuedJobs, seed: int) -> None:
        self._jobs = jobs
        self._random = random.Random(seed)

    def inject(self, name: str) -> str:
        """Inject one fault, or two at the same time, into a running job; return what happened."""
        kinds = self._random.sample(self._all(name), self._random.choice((1, 1, 2)))
        for _, fault in kinds:
            fault()
        return " and ".join(kind for kind, _ in kinds)

    def _all(self, name: str) -> list[tuple[str, Callable[[], None]]]:
        deletes = [(f"{role} deleted", lambda role=role: self._delete(name, role)) for role in GANG]
        forced = [(f"{role} killed", lambda role=role: self._delete(name, role, "--force")) for role in GANG]
        others: list[tuple[str, Callable[[], None]]] = [
            ("suspended and resumed", lambda: self._suspend(name)),
            ("preempted", self._preempt),
            ("preempted for a moment", lambda: self._preempt(waits=False)),
            ("operator killed", self._kill_operator),
            ("Kueue killed", self._kill_kueue),
        ]
        return [*deletes, *forced, *others]

    def _delete(self, name: str, role: str, *options: str) -> None:
        pods = self._jobs.pods(name, role)
        if pods:
            pod = self._random.choice(pods)["metadata"]["name"]
            self._jobs.kubectl("delete", "pod", pod, "--wait=false", "--ignore-not-found", *options)

    def _suspend(self, name: str) -> None:
        self._jobs.edit(name, '{"suspend": true}')
        if self._random.random() < 0.5:
            suspended = lambda: self._jobs.status(name).get("phase") == "Suspended"  # noqa: E731
            self._jobs.cluster.until("suspended", suspended, _SETTLES_WITHIN_S)
        self._jobs.edit(name, '{"suspend": false}')

    def _preempt(self, *, waits: bool = True) -> None:
        """Take the quota for a pod of higher priority, and give it back."""
        labels = {"kueue.x-k8s.io/queue-name": "team", "kueue.x-k8s.io/priority-class": "urgent"}
        container = {"name": "pause", "image": IMAGE, "resources": {"limits": {GPU: 4}, "requests": {"cpu": "10m"}}}
        container["resources"]["requests"]["memory"] = "10Mi"
        pod = {"containers": [container], "terminationGracePeriodSeconds": 0}
        metadata = {"name": "urgent", "namespace": NAMESPACE, "labels": labels}
        done = self._jobs.cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod})
        if done.returncode == 0 and waits:
            runs = lambda: self._phase("urgent") == "Running"  # noqa: E731
            self._jobs.cluster.until("preempted", runs, _SETTLES_WITHIN_S)
        self._jobs.kubectl("delete", "pod", "urgent", "--ignore-not-found")

    def _phase(self, pod: str) -> str:
        return str(self._jobs.cluster.get("pod", pod, NAMESPACE).get("status", {}).get("phase", ""))

    def _kill_operator(self) -> None:
        self._jobs.operator.kill()
        self._jobs.start_operator()

    def _kill_kueue(self) -> None:
        among = "control-plane=controller-manager"
        self._jobs.cluster.kubectl(*f"--namespace kueue-system delete pod -l {among} --force".split())
        ready = "wait deployment --all --for=condition=Available --timeout=120s"
        self._jobs.cluster.kubectl("--namespace", "kueue-system", *ready.split())
