"""Examples in pods: rollouts with vLLM, reward workers, a reward model and a trainer; tools with a scripted policy.

A few steps show that the parts work together in pods. That models learn is shown by tests/e2e, which runs the same
examples on this machine for as long as that takes.
"""

from __future__ import annotations

from typing import Any

import pytest
import training
from real_cluster import Cluster

pytestmark = pytest.mark.timeout(1200)

STEPS = 10
TOOL_STEPS = 5
JOB = "copy-digits"
CHILDREN = "deployment,statefulset,job,pod,service,serviceaccount,configmap,secret,networkpolicy,pdb,pvc"


def test_a_job_trains_completes_and_leaves_nothing_behind(shared: Cluster):
    before = names(shared)
    job = training.copy_digits(STEPS, JOB, lifecycle={"cleanup": "None"})
    job["spec"]["rollout"]["replicas"] = 2
    job["spec"]["reward"]["workers"]["replicas"] = 2
    scorers = job["spec"]["reward"]["scorers"]
    scorers += [training.reward_model(), {**scorers[0], "name": "again", "audit": {"share": 1.0}}]
    done = shared.apply(job)
    assert done.returncode == 0, done.stderr
    ready: dict[str, str] = {}

    def ended() -> dict[str, Any]:
        found = shared.get("rlj", JOB, training.NAMESPACE)
        status = found.get("status", {})
        ready.update({role: said for role, said in status.get("replicas", {}).items() if said[0] != "0"})
        return found if status.get("phase") in ("Complete", "Failed", "Invalid") else {}

    job = shared.until("the end of the job", ended, 900)
    status = job["status"]
    assert status["phase"] == "Complete", status["conditions"]
    assert set(ready) >= {"rollout", "reward"}
    assert status["progress"]["step"] == STEPS
    assert not status.get("restarts")
    rows = training.steps(shared, job)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["reward/mean"] > 0 and row["actor/grad_norm"] > 0 for row in rows)
    # Each step was generated with the weights of the one before, which the rollouts had to fetch.
    assert {row["reward_pipeline/staleness/max"] for row in rows} == {0}
    ledger = training.ledger(shared, job)
    assert ledger["trained"] == STEPS * job["spec"]["algorithm"]["promptsPerStep"]
    assert ledger["admitted"] == ledger["trained"] + ledger["dropped"] + ledger["evaluated"] + ledger["open"]
    assert not ledger["problems"]
    assert any(row.get("reward_pipeline/scorer/preference/value/mean") is not None for row in rows)
    assert all(row["timing_s/wait_for_gpus"] > 0 for row in rows)
    # The auditor is the scorer once more: of what it has audited by the last step it says the same.
    assert rows[-1]["audit/again/groups"] > 0
    assert rows[-1]["audit/again/value"] == pytest.approx(rows[-1]["audit/again/reward"])
    shared.kubectl("--namespace", training.NAMESPACE, "delete", "rlj", JOB)
    shared.until("nothing left behind", lambda: not left(shared, before))


def test_rollouts_call_tools_of_the_jobs_files(shared: Cluster):
    done = shared.apply(*training.tools(TOOL_STEPS))
    assert done.returncode == 0, done.stderr

    def ended() -> dict[str, Any]:
        found = shared.get("rlj", "tools", training.NAMESPACE)
        return found if found.get("status", {}).get("phase") in ("Complete", "Failed", "Invalid") else {}

    job = shared.until("the end of the job", ended, 900)
    assert job["status"]["phase"] == "Complete", job["status"]["conditions"]
    rows, spec = training.steps(shared, job), job["spec"]
    assert [row["step"] for row in rows] == list(range(1, TOOL_STEPS + 1))
    calls = len(rows) * spec["algorithm"]["promptsPerStep"] * spec["algorithm"]["samplesPerPrompt"]
    assert sum(row["reward_pipeline/tool/open_safe/outcome/ok"] for row in rows) == calls
    assert all(0.1 < row["reward/mean"] < 1.0 for row in rows)  # the digit of the script is right now and then
    assert not training.ledger(shared, job)["problems"]
    shared.kubectl("--namespace", training.NAMESPACE, "delete", "rlj/tools", "configmap/tools")


def names(cluster: Cluster) -> set[tuple[str, str]]:
    """Return kind and name of each object of the namespace, and of each volume."""
    found = cluster.get(CHILDREN, namespace=training.NAMESPACE)["items"] + cluster.get("pv")["items"]
    return {(item["kind"], item["metadata"]["name"]) for item in found}


def left(cluster: Cluster, before: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the objects that did not exist before."""
    return names(cluster) - before
