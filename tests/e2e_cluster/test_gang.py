"""Gangs on the real scheduler, and a queue's gates on the real API server: a job starts whole, or holds nothing.

The pods only start and idle. Their GPUs are fake capacity that the scheduler counts: eight, on two nodes.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from idle_jobs import IMAGE, NAMESPACE, Jobs, gang_job
from operator_process import OperatorProcess, kubeconfig_of_the_chart
from real_cluster import Cluster, harness

GPU = "nvidia.com/gpu"
GATE = "kueue.x-k8s.io/admission"


@pytest.fixture(scope="module")
def jobs(definition: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Yield a namespace with its own operator and a volume."""
    if not definition.own:
        pytest.skip("needs a cluster with PodGroups and eight GPUs that nobody else uses")
    folder = tmp_path_factory.mktemp("gangs")
    programs = [definition.program(name) for name in ("pause", "kubectl")]
    subprocess.run(harness("image", f"{folder}/idle.tar", IMAGE, *programs), check=True)
    subprocess.run(harness("load", f"{folder}/idle.tar"), check=True)
    definition.kubectl("create", "namespace", NAMESPACE, check=False)
    claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    metadata = {"name": "shared", "namespace": NAMESPACE}
    definition.apply({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": claim})
    operator = OperatorProcess(kubeconfig_of_the_chart(definition, folder), "gangs", NAMESPACE, folder / "log")
    definition.until("a leader", lambda: operator.leads, 60)
    yield Jobs(definition)
    definition.kubectl("--namespace", NAMESPACE, "delete", "rlj", "--all", check=False)
    operator.stop()


@pytest.fixture
def tenant(jobs: Jobs) -> Iterator[None]:
    """Run another tenant's pod on half of the GPUs."""
    container = {"name": "pause", "image": IMAGE, "resources": {"limits": {GPU: 4}}}
    metadata = {"name": "tenant", "namespace": NAMESPACE}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
    jobs.cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    jobs.cluster.kubectl("--namespace", NAMESPACE, "wait", "--for=condition=Ready", "pod/tenant", "--timeout=60s")
    yield
    leave(jobs)


def leave(jobs: Jobs) -> None:
    """Free the tenant's GPUs."""
    jobs.cluster.kubectl("--namespace", NAMESPACE, "delete", "pod/tenant", "--ignore-not-found")


def test_a_gang_that_does_not_fit_holds_nothing_and_starts_when_there_is_room(jobs: Jobs, tenant: None):
    jobs.make(gang_job("whole"))
    jobs.until_waiting("whole")
    assert len(jobs.pods("whole")) == 5
    assert jobs.bound("whole") == 0
    assert not jobs.pods("whole", "reward")  # roles outside the gang hold no resources meanwhile
    assert jobs.condition("whole", "RewardReady")["reason"] == "WaitingForRoom"
    words = [jobs.condition("whole", role)["message"] for role in ("RolloutReady", "TrainerRunning")]
    assert any(f"Insufficient {GPU}" in message for message in words)
    leave(jobs)
    began = time.monotonic()
    jobs.cluster.until("bound", lambda: jobs.bound("whole") == 5, 60)
    bound_s = time.monotonic() - began
    print(f"gang bound {bound_s:.1f} s after there was room, all running {jobs.until_running('whole'):.1f} s later")
    groups = jobs.cluster.get("podgroup", "", NAMESPACE)["items"]
    assert [group["metadata"]["name"] for group in groups] == [jobs.status("whole")["run"]]  # none of the Job's own


def test_a_trainers_attempt_and_a_rollout_come_back_into_a_running_gang(jobs: Jobs):
    before = {pod["metadata"]["uid"] for pod in jobs.pods("whole", "rollout", "redis")}
    pod = jobs.pods("whole", "trainer")[0]["metadata"]["name"]
    jobs.cluster.kubectl("--namespace", NAMESPACE, "delete", "pod", pod)
    jobs.cluster.until("counted", lambda: jobs.status("whole").get("attempt") == 1, 60)
    print(f"next attempt running after {jobs.until_running('whole'):.1f} s")
    assert {pod["metadata"]["uid"] for pod in jobs.pods("whole", "rollout", "redis")} == before
    assert jobs.status("whole")["restarts"] + jobs.status("whole")["disruptions"] == 1
    attempt = jobs.cluster.get("job", "whole-trainer-1", NAMESPACE)["metadata"]["uid"]
    pod = jobs.pods("whole", "rollout")[0]["metadata"]["name"]
    jobs.cluster.kubectl("--namespace", NAMESPACE, "delete", "pod", pod)
    jobs.cluster.until("replaced", lambda: pod not in {p["metadata"]["name"] for p in jobs.pods("whole")}, 60)
    jobs.until_running("whole")
    assert jobs.cluster.get("job", "whole-trainer-1", NAMESPACE)["metadata"]["uid"] == attempt


def test_a_suspended_gang_gives_everything_back_and_is_whole_again(jobs: Jobs, request: pytest.FixtureRequest):
    jobs.edit("whole", '{"suspend": true}')
    jobs.cluster.until("suspended", lambda: jobs.status("whole").get("phase") == "Suspended", 90)
    jobs.cluster.until("pods gone", lambda: not jobs.pods("whole"), 90)
    request.getfixturevalue("tenant")
    jobs.edit("whole", '{"suspend": false}')
    jobs.until_waiting("whole")
    assert jobs.bound("whole") == 0
    leave(jobs)
    jobs.until_running("whole")
    refused = jobs.cluster.kubectl(
        *f"--namespace {NAMESPACE} patch rlj whole --type=merge -p".split(), '{"spec": {"rollout": {"replicas": 3}}}',
        check=False,
    )  # fmt: skip
    assert "it is part of a gang" in refused.stderr
    jobs.delete("whole")
    jobs.cluster.until("no PodGroup", lambda: not jobs.cluster.get("podgroup", "", NAMESPACE)["items"], 60)


def test_of_two_jobs_that_fit_only_alone_one_runs_and_the_other_waits_whole(jobs: Jobs):
    names = {"left", "right"}
    jobs.make(*(gang_job(name) for name in sorted(names)))
    jobs.cluster.until("one runs", lambda: {n for n in names if jobs.status(n).get("phase") == "Running"}, 120)
    (first,) = (name for name in names if jobs.status(name)["phase"] == "Running")
    (second,) = names - {first}
    jobs.until_waiting(second)
    assert (jobs.bound(first), jobs.bound(second)) == (5, 0)
    jobs.delete(first)
    print(f"the second runs {jobs.until_running(second):.1f} s after the first was gone")
    jobs.delete(second)


def test_a_gang_that_never_fits_gives_up_at_its_deadline_and_leaves_nothing(jobs: Jobs):
    jobs.make(gang_job("never", rollouts=5))
    jobs.until_waiting("never")
    assert jobs.bound("never") == 0
    jobs.edit("never", '{"lifecycle": {"preRunningDeadlineSeconds": 1}}')
    jobs.cluster.until("failed", lambda: jobs.status("never").get("phase") == "Failed", 60)
    failed = jobs.condition("never", "Failed")
    assert failed["reason"] == "PreRunningDeadlineExceeded"
    assert "rollout 0/5" in failed["message"]
    assert f"Insufficient {GPU}" in failed["message"]
    everything = ("deployment,statefulset,job,podgroup", "pods")
    for kinds in everything:
        jobs.cluster.until(f"no {kinds}", lambda kinds=kinds: not jobs.cluster.get(kinds, "", NAMESPACE)["items"], 60)


def admit(jobs: Jobs, name: str) -> None:
    """Admit a group as Kueue does once it is complete and has its quota."""
    for pod in jobs.pods(name):
        gates = [{"op": "remove", "path": "/spec/schedulingGates"}]
        jobs.cluster.kubectl(
            "--namespace", NAMESPACE, "patch", "pod", pod["metadata"]["name"], "--type=json", "-p", json.dumps(gates)
        )


def preempt(jobs: Jobs, name: str) -> None:
    """Preempt a group as Kueue does: mark each pod, then delete it."""
    preempted = {"status": {"conditions": [{"type": "TerminationTarget", "status": "True", "reason": "Preempted"}]}}
    pods = [pod["metadata"]["name"] for pod in jobs.pods(name)]
    kubectl = partial(jobs.cluster.kubectl, "--namespace", NAMESPACE)
    for pod in pods:
        kubectl("patch", "pod", pod, "--subresource=status", "--type=strategic", "-p", json.dumps(preempted))
    kubectl("delete", "pods", *pods, "--ignore-not-found", "--wait=false")


def gated(jobs: Jobs, name: str) -> list[dict[str, Any]]:
    """Return the pods of a group that Kueue's gate holds back."""
    return [pod for pod in jobs.pods(name) if {"name": GATE} in pod["spec"].get("schedulingGates", [])]


def test_a_job_waits_behind_its_queues_gates_and_again_after_it_was_preempted(jobs: Jobs):
    jobs.make(gang_job("queued", scheduling={"queueName": "team"}, lifecycle={"preRunningDeadlineSeconds": 60}))
    jobs.cluster.until("all gated", lambda: len(gated(jobs, "queued")) == 5, 60)
    counts = {pod["metadata"]["annotations"]["kueue.x-k8s.io/pod-group-total-count"] for pod in jobs.pods("queued")}
    assert counts == {"5"}
    jobs.cluster.until("told", lambda: jobs.condition("queued", "Suspended").get("reason") == "Queued", 60)
    admit(jobs, "queued")
    jobs.until_running("queued")
    preempt(jobs, "queued")
    jobs.cluster.until("back in its queue", lambda: len(gated(jobs, "queued")) == 5, 90)
    jobs.cluster.until("told", lambda: jobs.status("queued").get("phase") == "Suspended", 60)
    jobs.cluster.until("no reward workers", lambda: not jobs.pods("queued", "reward"), 90)
    admit(jobs, "queued")
    jobs.until_running("queued")
    assert (jobs.status("queued")["restarts"], jobs.status("queued")["attempt"]) == (0, 1)
    jobs.delete("queued")
