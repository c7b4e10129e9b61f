"""A HorizontalPodAutoscaler scales reward workers by CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from real_cluster import Cluster
from scoring_job import NAMESPACE, Measured, ScoringJob

pytestmark = pytest.mark.timeout(1200)

MOST = 3
BUSY = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    time.sleep(0.05)
    return 1.0
"""
"""Half a CPU a worker at most: far more than its pod requests, even on a busy machine."""


@pytest.fixture(scope="module")
def job(metrics_server: Cluster) -> Iterator[ScoringJob]:
    code = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "busy", "namespace": NAMESPACE}}
    assert metrics_server.apply({**code, "data": {"busy.py": BUSY}}).returncode == 0
    autoscaling = {"provider": "hpa", "minReplicas": 1, "maxReplicas": MOST, "scaleDownAfterSeconds": 10}
    scorer = {"name": "busy", "kind": "python", "python": {"path": "busy.py"}}
    sections = {"reward": {"scorers": [scorer]}, "files": {"configMap": "busy"}}
    with ScoringJob(metrics_server, "computed", autoscaling, **sections) as job:
        yield job


def _scaling_active(job: ScoringJob) -> dict[str, Any]:
    return job.cluster.condition("hpa", f"{job.name}-reward", NAMESPACE, "ScalingActive")


def test_workers_come_with_the_load_and_go_after_it(job: ScoringJob, measured: Measured):
    began = time.monotonic()
    with job.load([{"id": f"s{i}", "response": "x"} for i in range(100_000)]):
        job.cluster.until("more workers", lambda: job.replicas == MOST, 240)
    measured(f"HPA: 1 to {MOST} workers", time.monotonic() - began)
    began = time.monotonic()
    job.cluster.until("one worker", lambda: job.replicas == 1, 240)
    measured(f"HPA: {MOST} to 1", time.monotonic() - began)
    assert not [name for name in job.writers_of_replicas if name.startswith("plaudit-operator")]


def test_an_hpa_without_figures_is_reported(job: ScoringJob):
    with job.without("kube-system", "metrics-server"):
        job.cluster.until("told", lambda: job.condition("Degraded")["reason"] == "AutoscalerFailing", 360)
        said = job.condition("Degraded")["message"]
        assert f"HorizontalPodAutoscaler {job.name}-reward cannot follow the load" in said
        assert "FailedGetResourceMetric" in said
    job.cluster.until("right again", lambda: job.condition("Degraded")["status"] == "False", 240)


def test_a_suspended_jobs_workers_stay_away(job: ScoringJob):
    job.patch(suspend=True)
    job.cluster.until("no workers", lambda: job.replicas == 0, 60)
    job.cluster.until("the HPA's rest", lambda: _scaling_active(job).get("reason") == "ScalingDisabled", 60)
    assert job.replicas == 0
    job.patch(suspend=False)
    job.cluster.until("a worker", lambda: job.ready == 1, 120)
