"""KEDA scales the rollouts of a running job by the query of docs/kubernetes/scheduling.md, through ``scale``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from idle_jobs import NAMESPACE, Jobs, gang_job, idle, prepare
from real_cluster import ROOT, Cluster
from ruamel.yaml import YAML
from scoring_job import Measured

pytestmark = pytest.mark.timeout(1200)

MOST = 3


@pytest.fixture(scope="module")
def jobs(keda: Cluster, monitored: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Yield a job with one rollout whose pods only start."""
    folder = tmp_path_factory.mktemp("scale")
    prepare(keda, folder)
    jobs = Jobs(keda)
    rollout = {"replicas": 1, "engine": {"tensorParallelSize": 1}, "pod": idle("rollout")}
    jobs.make(gang_job("gsm8k", scheduling={}, rollout=rollout))
    jobs.until_running("gsm8k")
    yield jobs
    for kind in ("scaledobject", "prometheusrule"):
        keda.kubectl("--namespace", NAMESPACE, "delete", kind, "--all", check=False)
    jobs.delete("gsm8k")


def test_rollouts_follow_the_share_of_a_step_that_waits_for_generation(jobs: Jobs, measured: Measured):
    record_step(jobs, waits_s=60)
    assert jobs.cluster.apply(documented_scaler()).returncode == 0
    measured(f"KEDA: 1 to {MOST} rollouts", until(jobs, MOST))
    record_step(jobs, waits_s=5)
    measured(f"KEDA: {MOST} to 1 rollouts", until(jobs, 1))
    assert jobs.status("gsm8k")["restarts"] == 0


def until(jobs: Jobs, rollouts: int) -> float:
    """Wait until a job has so many ready rollouts; return the seconds."""
    ready = lambda: jobs.status("gsm8k")["replicas"]["rollout"] == f"{rollouts}/{rollouts}"  # noqa: E731
    began = time.monotonic()
    jobs.cluster.until(f"{rollouts} rollouts", ready, 240)
    return time.monotonic() - began


def record_step(jobs: Jobs, waits_s: float) -> None:
    """Let Prometheus have the series of a job whose last step took 100 s, so many of them waiting for generation."""
    labels = {"namespace": NAMESPACE, "run": "gsm8k-000000"}
    waits = {"record": "plaudit_last_step_wait_seconds", "expr": f"vector({waits_s})"}
    rules = [
        {**waits, "labels": {**labels, "cause": "generation"}},
        {"record": "plaudit_last_step_seconds", "expr": "vector(100)", "labels": labels},
    ]
    group = {"name": "step", "interval": "5s", "rules": rules}
    metadata = {"name": "step", "namespace": NAMESPACE}
    rule = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule", "metadata": metadata}
    assert jobs.cluster.apply({**rule, "spec": {"groups": [group]}}).returncode == 0


def documented_scaler() -> dict[str, Any]:
    """Return the ScaledObject of the documentation, for this cluster and in a hurry."""
    page = (ROOT / "docs" / "kubernetes" / "scheduling.md").read_text()
    (block,) = (part for part in page.split("```yaml\n") if "kind: ScaledObject" in part)
    text = block.partition("```")[0].replace('namespace="team"', f'namespace="{NAMESPACE}"')
    scaler: dict[str, Any] = YAML(typ="safe").load(text)
    scaler["metadata"]["namespace"] = NAMESPACE
    scaler["spec"] |= {"minReplicaCount": 1, "maxReplicaCount": MOST, "pollingInterval": 5}
    behavior = scaler["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    behavior["scaleDown"]["stabilizationWindowSeconds"] = 0
    scaler["spec"]["triggers"][0]["metadata"]["serverAddress"] = "http://prometheus-operated.monitoring:9090"
    return scaler
