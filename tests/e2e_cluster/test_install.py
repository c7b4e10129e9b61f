"""Chart and images on a real cluster: an operator in pods, jobs in pods, all of it under Pod Security restricted."""

from __future__ import annotations

import os
from typing import Any

import pytest
from real_cluster import Cluster
from training import NAMESPACE, copy_digits

pytestmark = pytest.mark.timeout(1800)  # images are built, and a model learns


def test_both_operators_are_ready_and_one_leads(installed: Cluster):
    operators = installed.get("deployment", "plaudit-operator", "plaudit")
    assert operators["status"]["readyReplicas"] == 2
    lease = installed.get("lease", "plaudit-operator", "plaudit")
    assert lease["spec"]["holderIdentity"].startswith("plaudit-operator-")


def test_helm_test_passes(installed: Cluster):
    installed.run("helm", "test", "plaudit", "--namespace", "plaudit", "--timeout", "5m")


def test_a_job_learns_in_pods_and_completes(shared: Cluster):
    steps = int(os.environ.get("PLAUDIT_E2E_STEPS", "150"))
    done = shared.apply(copy_digits(steps, lifecycle={"cleanup": "None"}))
    assert done.returncode == 0, done.stderr

    def ended() -> dict[str, Any]:
        job = shared.get("rlj", "copy-digits", NAMESPACE)
        return job if job.get("status", {}).get("phase") in ("Complete", "Failed", "Invalid") else {}

    job = shared.until("the end of the job", ended, 1500)
    assert job["status"]["phase"] == "Complete", job["status"]["conditions"]
    progress = job["status"]["progress"]
    assert progress["step"] == steps
    if steps >= 150:
        assert progress["rewardMean"] > 0.5
    shared.kubectl("--namespace", NAMESPACE, "delete", "rlj", "copy-digits")
    kinds = "deployment,statefulset,job,service,configmap,secret,networkpolicy,pdb"

    def nothing_left() -> bool:
        items = shared.get(kinds, namespace=NAMESPACE).get("items", [])
        return not [item for item in items if item["metadata"]["name"].startswith("copy-digits-")]

    shared.until("nothing left behind", nothing_left, 120)
