"""``helm upgrade`` to another image under a running job: new operators, and nothing else is new."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import chart
import images
import pytest
from paced_job import NAMESPACE, PacedJob
from real_cluster import Cluster, harness

pytestmark = pytest.mark.timeout(900)

NEWER = {name: f"{image.rpartition(':')[0]}:newer" for name, image in chart.IMAGES.items()}


@pytest.fixture
def newer(shared: Cluster, tmp_path: Path) -> dict[str, str]:
    """Load the same images under another tag on all nodes."""
    if not shared.own:
        pytest.skip("loads images into the nodes of this machine")
    for image in {images.OPERATOR, images.WORKER, images.REDIS}:
        tagged = f"{image.rpartition(':')[0]}:newer"
        archive = tmp_path / f"{tagged.rpartition('/')[2].replace(':', '-')}.tar"
        subprocess.run(["buildah", "push", "-q", image, f"oci-archive:{archive}:{tagged}"], check=True)
        subprocess.run(harness("load", str(archive)), check=True)
        archive.unlink()
    return NEWER


def pods(cluster: Cluster, namespace: str) -> dict[str, tuple[str, list[int]]]:
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


def test_an_upgrade_of_all_images_restarts_no_pod_of_a_running_job(shared: Cluster, newer: dict[str, str]):
    job = PacedJob(shared, "upgraded", steps=200)
    job.start()
    try:
        before, generations, operators = pods(shared, NAMESPACE), versions(shared, job.name), pods(shared, "plaudit")
        chart.install(shared, images=newer)
        shared.until("new operators alone", lambda: not operators.keys() & pods(shared, "plaudit").keys(), 120)

        def a_new_one_leads() -> bool:
            holder = shared.get("lease", "plaudit-operator", "plaudit")["spec"].get("holderIdentity", "")
            return holder in pods(shared, "plaudit")

        shared.until("one of them leads", a_new_one_leads, 60)
        job.goes_on()
        assert pods(shared, NAMESPACE) == before
        assert versions(shared, job.name) == generations
        kubectl = ("--namespace", NAMESPACE, "scale", f"deployment/{job.name}-rollout", "--replicas=0")
        shared.kubectl(*kubectl)  # the new operator reconciles the job, which keeps its original image
        job.goes_on()
        used = {pod["spec"]["containers"][0]["image"] for pod in job.pods("rollout")}
        assert used == {images.WORKER}
        status = job.finish()
        assert status["phase"] == "Complete", status["conditions"]
        assert (status["restarts"], status["disruptions"]) == (0, 0)
    finally:
        job.delete()
        chart.install(shared)
