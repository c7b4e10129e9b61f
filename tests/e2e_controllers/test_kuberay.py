"""RLJobs and Ray clusters of a real KubeRay in one queue of a real Kueue: neither holds what the other waits for.

The quota is six GPUs; a job needs five and a Ray cluster four, so that one of them runs at a time. Pods only start.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from idle_jobs import IMAGE, NAMESPACE
from queued_jobs import GPU, GPUS_OF_A_JOB, PODS_OF_A_JOB, QueuedJobs, jobs_in_a_queue, queued_job
from real_cluster import Cluster

pytestmark = pytest.mark.timeout(1800)

GPUS_OF_RAY = 4
_WITHIN_S = 180


class RayClusters:
    """Ray clusters beside the jobs: a head with a GPU and three workers with one each."""

    def __init__(self, jobs: QueuedJobs) -> None:
        self._jobs = jobs

    def make(self, name: str, priority: str = "") -> None:
        """Create a Ray cluster in the jobs' queue."""
        labels = {"kueue.x-k8s.io/queue-name": "team"}
        if priority:
            labels["kueue.x-k8s.io/priority-class"] = priority
        metadata = {
            "name": name,
            "namespace": NAMESPACE,
            "labels": labels,
            "annotations": {"ray.io/overwrite-container-cmd": "true"},
        }
        workers = {"groupName": "workers", "replicas": 3, "minReplicas": 3, "maxReplicas": 3, "rayStartParams": {}}
        spec = {
            "headGroupSpec": {"rayStartParams": {}, "template": _pod("ray-head")},
            "workerGroupSpecs": [{**workers, "template": _pod("ray-worker")}],
        }
        manifest = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata, "spec": spec}
        done = self._jobs.cluster.apply(manifest)
        assert done.returncode == 0, done.stderr

    def delete(self, *names: str) -> None:
        """Delete Ray clusters, and wait until their pods are gone."""
        for name in names:
            self._jobs.kubectl("delete", "raycluster", name, "--ignore-not-found")
            self._jobs.cluster.until(f"{name} gone", partial(self._has, name, 0), _WITHIN_S)

    def until_running(self, name: str) -> None:
        """Wait until all four pods of a Ray cluster run."""
        self._jobs.cluster.until(f"{name} runs", partial(self._has, name, GPUS_OF_RAY, "Running"), _WITHIN_S)

    def until_queued(self, name: str) -> None:
        """Wait until a Ray cluster is suspended and has no pod."""
        self._jobs.cluster.until(f"{name} suspended", lambda: self._is_suspended(name), _WITHIN_S)
        self._jobs.cluster.until(f"{name} without pods", partial(self._has, name, 0), _WITHIN_S)

    def pods(self, name: str) -> list[dict[str, Any]]:
        """Return the pods of a Ray cluster."""
        return self._jobs.cluster.pods(NAMESPACE, f"ray.io/cluster={name}")

    def _has(self, name: str, count: int, phase: str = "") -> bool:
        pods = self.pods(name)
        return len(pods) == count and all(not phase or pod["status"].get("phase") == phase for pod in pods)

    def _is_suspended(self, name: str) -> bool:
        return bool(self._jobs.cluster.get("raycluster", name, NAMESPACE).get("spec", {}).get("suspend"))


def _pod(container: str) -> dict[str, Any]:
    resources = {"limits": {GPU: 1}, "requests": {"cpu": "10m", "memory": "10Mi"}}
    of_ray = {"name": container, "image": IMAGE, "command": ["/pause"], "resources": resources}
    return {"spec": {"containers": [of_ray], "terminationGracePeriodSeconds": 0}}


@pytest.fixture(scope="module")
def jobs(definition: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[QueuedJobs]:
    """Yield a namespace with Kueue's queue ``team``, an operator of its own, and KubeRay's beside it."""
    with jobs_in_a_queue(definition, tmp_path_factory.mktemp("kuberay"), "kuberay") as jobs:
        yield jobs


@pytest.fixture
def ray(jobs: QueuedJobs) -> Iterator[RayClusters]:
    """Yield the Ray clusters; none and no job is left after a test."""
    clusters = RayClusters(jobs)
    yield clusters
    clusters.delete("ray", "urgent-ray")
    jobs.delete_all()
    jobs.cluster.until("the quota is free", lambda: jobs.reserved() == 0, 60)


def test_whoever_came_first_runs_first_and_what_waits_holds_nothing(jobs: QueuedJobs, ray: RayClusters):
    jobs.make(queued_job("left"))
    jobs.until_running("left")
    ray.make("ray")
    ray.until_queued("ray")
    jobs.make(queued_job("right"))
    jobs.until_queued("right")
    assert jobs.reserved() == GPUS_OF_A_JOB
    jobs.delete("left")
    ray.until_running("ray")
    assert (jobs.bound("right"), jobs.reserved()) == (0, GPUS_OF_RAY)
    ray.delete("ray")
    jobs.until_running("right")
    assert jobs.bound("right") == PODS_OF_A_JOB


def test_an_urgent_job_preempts_a_ray_cluster_which_returns_after_it(jobs: QueuedJobs, ray: RayClusters):
    ray.make("ray")
    ray.until_running("ray")
    jobs.make(queued_job("urgent", "urgent"))
    jobs.until_running("urgent")
    ray.until_queued("ray")
    assert (jobs.bound("urgent"), jobs.reserved()) == (PODS_OF_A_JOB, GPUS_OF_A_JOB)
    jobs.delete("urgent")
    ray.until_running("ray")


def test_an_urgent_ray_cluster_preempts_a_job_which_returns_after_it(jobs: QueuedJobs, ray: RayClusters):
    jobs.make(queued_job("left"))
    jobs.until_running("left")
    ray.make("urgent-ray", "urgent")
    ray.until_running("urgent-ray")
    jobs.until_queued("left")
    status = jobs.status("left")
    assert (status["restarts"], status["disruptions"], jobs.reserved()) == (0, 1, GPUS_OF_RAY)
    ray.delete("urgent-ray")
    jobs.until_running("left")
    assert jobs.bound("left") == PODS_OF_A_JOB


def test_killed_operators_of_both_leave_the_running_one_alone(jobs: QueuedJobs, ray: RayClusters):
    ray.make("ray")
    ray.until_running("ray")
    jobs.make(queued_job("left"))
    jobs.until_queued("left")
    before = {pod["metadata"]["uid"] for pod in ray.pods("ray")}
    jobs.operator.kill()
    jobs.cluster.kubectl("--namespace", "ray-system", "delete", "pod", "--all", "--force")
    jobs.start_operator()
    available = ("deployment", "--all", "--for=condition=Available", "--timeout=120s")
    jobs.cluster.kubectl("--namespace", "ray-system", "wait", *available)
    jobs.until_queued("left")
    assert {pod["metadata"]["uid"] for pod in ray.pods("ray")} == before
    ray.delete("ray")
    jobs.until_running("left")
