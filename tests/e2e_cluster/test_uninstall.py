"""``helm uninstall`` under a running job. Runs last."""

from __future__ import annotations

from typing import Any

import chart
import pytest
import training
from real_cluster import Cluster

pytestmark = pytest.mark.timeout(900)

JOB = "stays"


def pods(cluster: Cluster) -> dict[str, tuple[str, int]]:
    """The job's ready pods: uid and restarts, by name."""
    return {
        pod["metadata"]["name"]: (pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"])
        for pod in cluster.get("pod", namespace=training.NAMESPACE).get("items", [])
        if pod["metadata"].get("labels", {}).get("plaudit.dev/job") == JOB
        and all(status["ready"] for status in pod["status"].get("containerStatuses", [{"ready": False}]))
    }


def test_uninstall_leaves_running_jobs_alone_and_says_so(installed: Cluster):
    reward = {"scorers": [{"name": "gsm8k", "kind": "rule", "rule": "gsm8k"}]}
    job: dict[str, Any] = {
        "apiVersion": "plaudit.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": JOB, "namespace": training.NAMESPACE},
        "spec": {"reward": reward, "transport": {"managed": {"memory": "256Mi", "storage": "1Gi"}}},
    }
    done = installed.apply(job)
    assert done.returncode == 0, done.stderr
    installed.until("Redis, metrics, a gateway and a reward worker", lambda: len(pods(installed)) == 4)
    before = pods(installed)

    said = installed.run("helm", "uninstall", "plaudit", "--namespace", "plaudit", "--wait").stdout
    assert "rljobs.plaudit.dev" in said, "what is kept"
    assert not installed.get("deployment", "plaudit-operator", "plaudit")
    assert pods(installed) == before

    assert "Running jobs continue" in chart.install(installed).stdout
    installed.until("a leader", lambda: installed.get("lease", "plaudit-operator", "plaudit"))
    assert pods(installed) == before
    installed.kubectl("--namespace", training.NAMESPACE, "delete", "rlj", JOB)
    installed.until("nothing left", lambda: not left(installed))


def left(cluster: Cluster) -> list[str]:
    """The job's objects."""
    kinds = "deployment,statefulset,pod,service,serviceaccount,configmap,secret,networkpolicy,pvc"
    items = cluster.get(kinds, namespace=training.NAMESPACE)["items"]
    return [item["metadata"]["name"] for item in items if JOB in item["metadata"]["name"]]
