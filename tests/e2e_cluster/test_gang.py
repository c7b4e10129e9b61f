"""Gangs on the real scheduler: a job starts whole, or holds nothing. tests/e2e_controllers has queues, on a real Kueue.

The pods only start and idle. Their GPUs are fake capacity that the scheduler counts: eight, on two nodes.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from idle_jobs import ENDS, IMAGE, NAMESPACE, Jobs, gang_job, idle, prepare
from operator_process import OperatorProcess, kubeconfig_of_the_chart
from real_cluster import Cluster, harness

GPU = "nvidia.com/gpu"


@pytest.fixture(scope="module")
def jobs(definition: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Yield a namespace with its own operator and a volume."""
    if not definition.own:
        pytest.skip("needs a cluster with PodGroups and eight GPUs that nobody else uses")
    folder = tmp_path_factory.mktemp("gangs")
    prepare(definition, folder)
    operator = OperatorProcess(kubeconfig_of_the_chart(definition, folder), "gangs", NAMESPACE, folder / "log")
    definition.until("a leader", lambda: operator.leads)
    yield Jobs(definition)
    definition.kubectl("--namespace", NAMESPACE, "delete", "rlj", "--all", check=False)
    operator.stop()


@pytest.fixture
def tenant(jobs: Jobs) -> Iterator[None]:
    """Run another tenant's pod on half of the GPUs."""
    enter(jobs)
    yield
    leave(jobs)


def enter(jobs: Jobs) -> None:
    """Take half of the GPUs."""
    container = {"name": "pause", "image": IMAGE, "resources": {"limits": {GPU: 4}}}
    metadata = {"name": "tenant", "namespace": NAMESPACE}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
    jobs.cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    jobs.cluster.kubectl("--namespace", NAMESPACE, "wait", "--for=condition=Ready", "pod/tenant", "--timeout=300s")


def leave(jobs: Jobs) -> None:
    """Free the tenant's GPUs."""
    jobs.cluster.kubectl("--namespace", NAMESPACE, "delete", "pod/tenant", "--ignore-not-found")


def test_a_gang_starts_whole_heals_and_gives_everything_back(jobs: Jobs, tenant: None):
    """What does not fit holds nothing; a trainer's attempt and a rollout come back; a suspended gang is whole again."""
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
    jobs.cluster.until("bound", lambda: jobs.bound("whole") == 5)
    bound_s = time.monotonic() - began
    print(f"gang bound {bound_s:.1f} s after there was room, all running {jobs.until_running('whole'):.1f} s later")
    groups = jobs.cluster.get("podgroup", "", NAMESPACE)["items"]
    assert [group["metadata"]["name"] for group in groups] == [jobs.status("whole")["run"]]  # none of the Job's own

    before = {pod["metadata"]["uid"] for pod in jobs.pods("whole", "rollout", "redis")}
    pod = jobs.pods("whole", "trainer")[0]["metadata"]["name"]
    jobs.cluster.kubectl("--namespace", NAMESPACE, "delete", "pod", pod)
    jobs.cluster.until("counted", lambda: jobs.status("whole").get("attempt") == 1)
    print(f"next attempt running after {jobs.until_running('whole'):.1f} s")
    assert {pod["metadata"]["uid"] for pod in jobs.pods("whole", "rollout", "redis")} == before
    assert jobs.status("whole")["restarts"] + jobs.status("whole")["disruptions"] == 1
    attempt = jobs.cluster.get("job", "whole-trainer-1", NAMESPACE)["metadata"]["uid"]
    pod = jobs.pods("whole", "rollout")[0]["metadata"]["name"]
    jobs.cluster.kubectl("--namespace", NAMESPACE, "delete", "pod", pod)
    jobs.cluster.until("replaced", lambda: pod not in {p["metadata"]["name"] for p in jobs.pods("whole")})
    jobs.until_running("whole")
    assert jobs.cluster.get("job", "whole-trainer-1", NAMESPACE)["metadata"]["uid"] == attempt

    jobs.edit("whole", '{"suspend": true}')
    jobs.cluster.until("suspended", lambda: jobs.status("whole").get("phase") == "Suspended")
    jobs.cluster.until("pods gone", lambda: not jobs.pods("whole"))
    enter(jobs)
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
    jobs.cluster.until("no PodGroup", lambda: not jobs.cluster.get("podgroup", "", NAMESPACE)["items"])


def test_of_two_jobs_that_fit_only_alone_one_runs_and_the_other_waits_whole(jobs: Jobs):
    names = {"left", "right"}
    jobs.make(*(gang_job(name) for name in sorted(names)))
    jobs.cluster.until("one runs", lambda: {n for n in names if jobs.status(n).get("phase") == "Running"})
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
    jobs.cluster.until("failed", lambda: jobs.status("never").get("phase") == "Failed")
    failed = jobs.condition("never", "Failed")
    assert failed["reason"] == "PreRunningDeadlineExceeded"
    assert "rollout 0/5" in failed["message"]
    assert f"Insufficient {GPU}" in failed["message"]
    everything = ("deployment,statefulset,job,podgroup", "pods")
    for kinds in everything:
        jobs.cluster.until(f"no {kinds}", lambda kinds=kinds: not jobs.cluster.get(kinds, "", NAMESPACE)["items"])


def test_a_lost_pod_restarts_its_replica_of_two_pods_and_the_other_goes_on(jobs: Jobs):
    rollout = {"replicas": 2, "podsPerReplica": 2, "engine": {"tensorParallelSize": 2}, "pod": idle("rollout")}
    jobs.make(gang_job("replicas", rollout=rollout))
    print(f"2 × 2 pods running after {jobs.until_running('replicas'):.1f} s")
    before = replicas(jobs)
    assert {len(pods) for pods in before.values()} == {2}
    assert jobs.status("replicas")["replicas"]["rollout"] == "4/4"
    hosts = {f"{pod['spec']['hostname']}.{pod['spec']['subdomain']}" for pod in jobs.pods("replicas", "rollout")}
    assert hosts == {f"replicas-rollout-{replica}-0-{rank}.replicas-rollout" for replica in "01" for rank in "01"}
    began = time.monotonic()
    jobs.cluster.kubectl("--namespace", NAMESPACE, "delete", "pod", min(before["0"]))
    jobs.cluster.until("replaced", lambda: replicas(jobs).get("0", {}).keys().isdisjoint(before["0"]))
    jobs.cluster.until("whole again", lambda: jobs.status("replicas")["replicas"]["rollout"] == "4/4")
    jobs.until_running("replicas")
    print(f"whole again {time.monotonic() - began:.1f} s after a pod was deleted")
    after = replicas(jobs)
    assert len(after["0"]) == 2
    assert after["0"].keys().isdisjoint(before["0"])
    assert after["1"] == before["1"]
    assert jobs.status("replicas")["restarts"] == 0
    jobs.delete("replicas")


@pytest.fixture
def scaled(jobs: Jobs) -> Iterator[str]:
    """Run a job of two rollouts without a gang."""
    rollout = {"replicas": 2, "engine": {"tensorParallelSize": 1}, "pod": idle("rollout")}
    jobs.make(gang_job("scaled", scheduling={}, rollout=rollout))
    jobs.until_running("scaled")
    yield "scaled"
    jobs.delete("scaled")


def test_rollouts_of_a_job_without_gang_follow_kubectl_scale(jobs: Jobs, scaled: str, tmp_path: Path):
    # Without what kubectl knows of an earlier definition, on a cluster that is kept between runs.
    scale = ("--cache-dir", str(tmp_path), "--namespace", NAMESPACE, "scale", "rlj", scaled)
    jobs.cluster.kubectl(*scale, "--current-replicas=2", "--replicas=3")
    jobs.cluster.until("three", lambda: jobs.status(scaled)["replicas"]["rollout"] == "3/3")
    assert (jobs.status(scaled)["rollouts"], jobs.status(scaled)["phase"]) == (3, "Running")
    jobs.cluster.kubectl(*scale, "--replicas=1")
    jobs.cluster.until("one", lambda: jobs.status(scaled).get("rollouts") == 1)
    refused = jobs.cluster.kubectl(*scale, "--replicas=0", check=False)
    assert "should be greater than or equal to 1" in refused.stderr


def test_a_killed_api_server_disturbs_no_pod_and_edits_after_it_are_followed(jobs: Jobs, scaled: str):
    before = {pod["metadata"]["uid"] for pod in jobs.pods(scaled, *ROLES)}
    began = time.monotonic()
    subprocess.run(harness("restart-api-server"), check=True)
    print(f"API server back after {time.monotonic() - began:.1f} s")
    jobs.edit(scaled, '{"rollout": {"replicas": 3}}')
    jobs.cluster.until("three", lambda: jobs.status(scaled)["replicas"]["rollout"] == "3/3")
    print(f"an edit is followed {time.monotonic() - began:.1f} s after the kill")
    assert before <= {pod["metadata"]["uid"] for pod in jobs.pods(scaled, *ROLES)}
    jobs.until_running(scaled)
    assert (jobs.status(scaled)["restarts"], jobs.status(scaled)["disruptions"]) == (0, 0)


def test_redis_of_a_deleted_job_stays_until_its_trainer_has_ended(jobs: Jobs):
    trainer = idle("trainer")
    trainer["template"]["spec"]["containers"][0]["lifecycle"] = {"preStop": {"sleep": {"seconds": 20}}}  # it saves
    ranks = {"ranks": 2, "ranksPerPod": 1, "strategy": "fsdp2", "pod": trainer}
    jobs.make(gang_job("leaves", scheduling={}, trainer=ranks))
    jobs.until_running("leaves")
    owners = ("statefulset", "leaves-redis", NAMESPACE)

    def owned_by_the_trainer() -> bool:
        kinds = [owner["kind"] for owner in jobs.cluster.get(*owners)["metadata"]["ownerReferences"]]
        return kinds == ["RLJob", "Pod"]

    jobs.cluster.until("owned by the trainer", owned_by_the_trainer)
    jobs.cluster.kubectl("--namespace", NAMESPACE, "delete", "rlj", "leaves")
    jobs.cluster.until("rollouts gone", lambda: not jobs.pods("leaves", "rollout", "reward", "metrics"))
    assert len(jobs.pods("leaves", "trainer")) == 2
    (redis,) = jobs.pods("leaves", "redis")
    assert "deletionTimestamp" not in redis["metadata"]
    graces = {pod["metadata"]["deletionGracePeriodSeconds"] for pod in jobs.pods("leaves", "trainer")}
    assert graces == {120}
    jobs.cluster.until("all gone", lambda: jobs.gone("leaves"))
    jobs.cluster.until("no Redis", lambda: not jobs.cluster.get("statefulset", "", NAMESPACE)["items"])


INJECTED = """\
[JSONPatch{op: "add", path: "/spec/containers/-", value: Object.spec.containers{
  name: "proxy", image: object.spec.containers[0].image,
  command: object.metadata.labels["plaudit.dev/job"] == "fails" ? ["/kubectl", "nonsense"] : ["/pause"]}}]
"""


@pytest.fixture
def injection(jobs: Jobs) -> Iterator[None]:
    """Put a plain sidecar into the trainers of two jobs, as a mesh's webhook does: one stays, the other one fails."""
    pods = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    labels = "object.metadata.?labels"
    spec = {
        "matchConstraints": {"resourceRules": [pods]},
        "matchConditions": [
            {"name": "trainer", "expression": f'{labels}[?"plaudit.dev/role"].orValue("") == "trainer"'},
            {"name": "job", "expression": f'{labels}[?"plaudit.dev/job"].orValue("") in ["stays", "fails"]'},
        ],
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": INJECTED}}],
    }
    head = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": "injection"}}
    policy = {**head, "kind": "MutatingAdmissionPolicy", "spec": spec}
    binding = {**head, "kind": "MutatingAdmissionPolicyBinding", "spec": {"policyName": "injection"}}
    done = jobs.cluster.apply(policy, binding)
    assert done.returncode == 0, done.stderr
    yield
    kinds = "mutatingadmissionpolicy/injection", "mutatingadmissionpolicybinding/injection"
    jobs.cluster.kubectl("delete", *kinds)


def test_sidecars_that_stay_fail_or_end_are_no_end_of_a_job_and_no_secret(jobs: Jobs, injection: None):
    ends = idle("trainer")
    ends["template"]["spec"]["containers"][0]["command"] = ENDS

    trial = f"run trial --image={IMAGE} --labels=plaudit.dev/role=trainer,plaudit.dev/job=stays --dry-run=server -oyaml"

    def injected() -> bool:
        return "proxy" in jobs.cluster.kubectl("--namespace", NAMESPACE, *trial.split(), check=False).stdout

    jobs.cluster.until("the injection", injected)
    reward = idle("reward")
    reward["template"]["spec"]["containers"].append({"name": "proxy", "image": IMAGE, "command": ENDS})
    made = [gang_job(name, 1, scheduling={}, trainer={"pod": ends}) for name in ("stays", "fails")]
    made.append(gang_job("ends", 1, scheduling={}))
    made[-1]["spec"]["reward"]["workers"]["pod"] = reward
    jobs.make(*made)
    for name in ("stays", "fails"):
        jobs.cluster.until(f"{name} complete", lambda name=name: jobs.status(name).get("phase") == "Complete")
        assert jobs.status(name).get("restarts", 0) == 0
        jobs.cluster.until("no trainer", lambda name=name: not jobs.pods(name, "trainer"))
    told = "proxy ends with code 0, and Kubernetes starts it again and again. Let it run for as long as the pod"
    jobs.cluster.until("what ends is named", lambda: told in jobs.condition("ends", "RewardReady")["message"])
    jobs.delete("stays", "fails", "ends")


ROLES = ("trainer", "rollout", "redis", "reward", "metrics")


def replicas(jobs: Jobs) -> dict[str, dict[str, str]]:
    """Return the uids of the rollouts' pods by name, by the number of their replica."""
    found: dict[str, dict[str, str]] = {}
    for pod in jobs.pods("replicas", "rollout"):
        metadata = pod["metadata"]
        found.setdefault(metadata["labels"]["plaudit.dev/replica"], {})[metadata["name"]] = metadata["uid"]
    return found
