"""``helm upgrade`` to a later release under a running job, and ``helm rollback`` under a job of that release.

Both jobs run on untouched, lose their trainer, start its next attempt, and complete.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chart
import next_release
import pytest
from paced_job import NAMESPACE, PacedJob
from real_cluster import Cluster, harness

pytestmark = pytest.mark.timeout(1200)

Pods = dict[str, tuple[str, list[int]]]


@dataclass
class Release:
    """A release of Plaudit."""

    images: dict[str, str]
    chart: Path


@pytest.fixture(scope="module")
def later(installed: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Future[Release]]:
    """Build a later release, and load its images into all nodes, while volumes are filled and a job starts."""
    if not installed.own:
        pytest.skip("builds images, and loads them into the nodes of this machine")
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(_later, tmp_path_factory.mktemp("next"))
    chart.install(installed)


def _later(folder: Path) -> Release:
    built, chart_, archives = next_release.build(folder)
    subprocess.run(harness("load", *map(str, archives)), check=True)
    for archive in archives:
        archive.unlink()
    return Release(built, chart_)


def pods(cluster: Cluster, namespace: str) -> Pods:
    """Uid and restarts of every pod of a namespace that stays."""
    return {
        pod["metadata"]["name"]: (
            pod["metadata"]["uid"],
            [status["restartCount"] for status in pod["status"].get("containerStatuses", [])],
        )
        for pod in cluster.get("pods", namespace=namespace)["items"]
        if "deletionTimestamp" not in pod["metadata"]
    }


def versions(cluster: Cluster, name: str) -> dict[tuple[str, str], int]:
    """Generations of the job's workloads: one more after any change of their specification."""
    found = cluster.get("deployment,statefulset,job", namespace=NAMESPACE)["items"]
    mine: list[dict[str, Any]] = [item for item in found if item["metadata"]["name"].startswith(f"{name}-")]
    return {(item["kind"], item["metadata"]["name"]): item["metadata"]["generation"] for item in mine}


def helm(cluster: Cluster, *argv: str) -> None:
    """Run helm on the release of the tests; return once other operators work than before, and one of them leads."""
    before = pods(cluster, "plaudit").keys()
    cluster.run("helm", *argv, "--namespace", "plaudit", "--wait")
    cluster.until("other operators", lambda: not before & pods(cluster, "plaudit").keys())

    def one_leads() -> bool:
        holder = cluster.get("lease", "plaudit-operator", "plaudit")["spec"].get("holderIdentity", "")
        return holder in pods(cluster, "plaudit")

    cluster.until("one of them leads", one_leads)


def state(job: PacedJob) -> tuple[Pods, dict[tuple[str, str], int], dict[str, str]]:
    """Everything of a job that a release must not touch: its pods, its workloads, its frozen files."""
    frozen = job.cluster.get("configmap", f"{job.name}-job", NAMESPACE)["data"]
    return pods(job.cluster, NAMESPACE), versions(job.cluster, job.name), frozen


def lose_the_trainer(job: PacedJob) -> None:
    """Delete the trainer's pod and wait for its next attempt."""
    attempt = job.status["attempt"]
    trainer = job.pods("trainer")[0]["metadata"]["name"]
    job.cluster.kubectl("--namespace", NAMESPACE, "delete", "pod", trainer)
    job.cluster.until("the next attempt", lambda: job.status["attempt"] == attempt + 1)
    job.goes_on()


def images_of(job: PacedJob) -> set[str]:
    return {pod["spec"]["containers"][0]["image"] for pod in job.pods("trainer", "rollout", "reward", "metrics")}


def finished(job: PacedJob) -> None:
    """Let a job end, and assert that it succeeded after one disruption."""
    status = job.finish()
    assert status["phase"] == "Complete", status["conditions"]
    assert (status["restarts"], status["disruptions"]) == (0, 1)


def test_running_jobs_bear_an_upgrade_and_a_rollback(later: Future[Release], shared: Cluster):
    # More steps than the later release accepts. No reward worker is drained: its scores may be slow.
    old = PacedJob(shared, "before", steps=next_release.MOST_STEPS + 4, slow_s=30)
    new = PacedJob(shared, "after", steps=next_release.MOST_STEPS, slow_s=30)
    images_before = set(chart.IMAGES.values())
    old.start()
    try:
        before, release = state(old), later.result()
        values = [word for name, image in release.images.items() for word in ("--set", f"images.{name}={image}")]
        helm(shared, "upgrade", "plaudit", str(release.chart), "--reset-then-reuse-values", *values)
        assert next_release.NEW_FIELD in shared.kubectl("explain", "rlj.spec.rollout.engine").stdout
        old.goes_on()
        assert state(old) == before
        lose_the_trainer(old)
        assert images_of(old) <= images_before
        assert old.condition("SpecValid")["status"] == "True"
        finished(old)
        old.delete()

        job = new.manifest()
        job["spec"]["rollout"]["engine"][next_release.NEW_FIELD] = 2
        new.start(job)
        before = state(new)
        assert images_of(new) <= set(release.images.values()) - images_before
        helm(shared, "rollback", "plaudit")
        assert next_release.NEW_FIELD not in shared.kubectl("explain", "rlj.spec.rollout.engine").stdout
        new.goes_on()
        assert state(new) == before
        lose_the_trainer(new)
        assert images_of(new) <= set(release.images.values()) - images_before
        assert new.condition("SpecValid")["status"] == "True"
        finished(new)
    finally:
        old.delete()
        new.delete()
