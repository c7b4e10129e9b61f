"""A job in pods survives the faults of a cluster, first one at a time and then several at once.

All tests of this file run against one job. At the end it completes without help, its ledger adds up, and it was trained
on exactly the prompts of a run without faults, each once. The last test checks this; the others check that the job
recovers from each fault, and print how long that took. ``PLAUDIT_E2E_SEED`` seeds the random faults.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from paced_job import NAMESPACE, PROMPTS, SAMPLES, PacedJob
from pod_processes import main_process
from real_cluster import Cluster, harness

pytestmark = pytest.mark.timeout(900)

STEPS, SLOW_S = 180, 15
ROLES = ("rollout", "reward", "metrics", "trainer", "redis")
APART = (("rollout", "reward", "metrics"), ("trainer",), ("redis",))
"""Roles that are struck at the same time: the job waits for none of the first three, and each is replaced by itself."""
SEED = int(os.environ.get("PLAUDIT_E2E_SEED", "0"))
Tell = Callable[[str, float], None]


@pytest.fixture(scope="module")
def job(shared: Cluster) -> Iterator[PacedJob]:
    """Yield a job that trains with slow scores."""
    if not shared.own:
        pytest.skip("kills nodes and processes of this machine")
    job = PacedJob(shared, "faults", STEPS, slow_s=SLOW_S)
    job.start()
    yield job
    job.delete()


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Tell:
    """Return a function that prints a duration even if pytest captures output."""

    def tell(what: str, seconds: float) -> None:
        with capsys.disabled():
            print(f"\n  {what}: {seconds:.1f} s", end=" ")

    return tell


def kubectl(job: PacedJob, *argv: str) -> str:
    return job.cluster.kubectl("--namespace", NAMESPACE, *argv).stdout


def delete_by_force(job: PacedJob, pod: dict[str, Any]) -> None:
    kubectl(job, "delete", "pod", pod["metadata"]["name"], "--grace-period=0", "--force")


def kill_process(job: PacedJob, pod: dict[str, Any]) -> None:
    os.kill(main_process(pod), signal.SIGKILL)


def state_of(job: PacedJob, *roles: str) -> set[tuple[str, int]]:
    """Return pods and their restarts, which differ after a pod was replaced or restarted."""
    return {
        (pod["metadata"]["uid"], sum(c["restartCount"] for c in pod["status"].get("containerStatuses", [])))
        for pod in job.pods(*roles)
    }


def node_of(job: PacedJob, role: str) -> str:
    return str(job.pods(role)[0]["spec"]["nodeName"])


def counts(job: PacedJob) -> tuple[int, int]:
    """Return the trainer's attempts that failed, and those that the cluster ended."""
    status = job.status
    return status["restarts"], status["disruptions"]


@pytest.mark.parametrize("roles", APART, ids="-".join)
@pytest.mark.parametrize("strike", [delete_by_force, kill_process])
def test_a_pod_of_each_role_is_replaced(
    job: PacedJob, tell: Tell, roles: tuple[str, ...], strike: Callable[[PacedJob, dict[str, Any]], None]
):
    before, attempts = {role: state_of(job, role) for role in roles}, counts(job)
    began = time.monotonic()
    for role in roles:
        strike(job, job.pods(role)[0])
    for role in roles:
        job.cluster.until(f"the end of a pod of {role}", lambda role=role: state_of(job, role) - before[role])
    job.goes_on()
    tell(f"{', '.join(roles)} {strike.__name__}: goes on after", time.monotonic() - began)
    is_trainer = roles == ("trainer",)
    expected = {"delete_by_force": (0, 1), "kill_process": (1, 0)}[strike.__name__] if is_trainer else (0, 0)
    assert tuple(now - then for now, then in zip(counts(job), attempts, strict=True)) == expected


def leader(cluster: Cluster) -> str:
    return str(cluster.get("lease", "plaudit-operator", "plaudit")["spec"]["holderIdentity"])


def test_a_standby_takes_over_when_the_leaders_pod_is_deleted_by_force(job: PacedJob, tell: Tell):
    before = state_of(job)
    first, began = leader(job.cluster), time.monotonic()
    job.cluster.kubectl("--namespace", "plaudit", "delete", "pod", first, "--grace-period=0", "--force")
    job.cluster.until("takeover", lambda: leader(job.cluster) not in (first, ""))
    tell("operator deleted by force: another leads after", time.monotonic() - began)
    job.goes_on()
    assert state_of(job) == before


def test_a_standby_takes_over_from_a_leader_that_hangs_and_only_one_leads_when_it_wakes(job: PacedJob, tell: Tell):
    cluster, before = job.cluster, state_of(job)
    cluster.kubectl("--namespace", "plaudit", "rollout", "status", "deployment/plaudit-operator", "--timeout=120s")
    first = leader(cluster)
    frozen = main_process(cluster.get("pod", first, "plaudit"))
    began = time.monotonic()
    os.kill(frozen, signal.SIGSTOP)
    try:
        cluster.until("takeover", lambda: leader(cluster) != first)
        took = time.monotonic() - began
    finally:
        os.kill(frozen, signal.SIGCONT)
    tell("operator frozen: another leads after", took)
    assert took <= 30  # a Lease of 15 s, looked at every 2 s

    def started_again() -> bool:
        pod = cluster.get("pod", first, "plaudit")
        return bool(pod["status"]["containerStatuses"][0]["restartCount"])

    cluster.until("who has lost the Lease leaves", started_again)
    assert leader(cluster) != first
    job.goes_on()
    assert state_of(job) == before


def test_children_that_are_deleted_by_hand_come_back(job: PacedJob, tell: Tell):
    roles = [f"deployment/{job.name}-{role}" for role in ("rollout", "reward", "metrics")]
    others = [f"service/{job.name}-{role}" for role in ("redis", "metrics")]
    others += [f"pdb/{job.name}-reward", f"networkpolicy/{job.name}-redis", f"configmap/{job.name}-job"]
    before, began = state_of(job, "rollout", "reward", "metrics"), time.monotonic()
    kubectl(job, "delete", *roles, *others, "--wait=false")
    job.cluster.until("all ended", lambda: not before & state_of(job))
    job.goes_on()
    tell("children deleted: goes on after", time.monotonic() - began)
    kubectl(job, "get", *roles, *others)


def test_a_redis_that_is_deleted_with_its_volume_is_filled_again_from_the_ledger(job: PacedJob, tell: Tell):
    claim, began = job.cluster.get("pvc", f"data-{job.name}-redis-0", NAMESPACE)["metadata"]["uid"], time.monotonic()
    kubectl(job, "delete", f"statefulset/{job.name}-redis")

    def another() -> bool:
        found = job.cluster.get("pvc", f"data-{job.name}-redis-0", NAMESPACE)
        return bool(found) and found["metadata"]["uid"] != claim

    job.cluster.until("another volume", another)
    job.goes_on()
    tell("Redis and its volume deleted: goes on after", time.monotonic() - began)


def test_children_that_are_edited_by_hand_are_put_right(job: PacedJob, tell: Tell):
    metrics, service = f"deployment/{job.name}-metrics", f"service/{job.name}-redis"
    image = ["get", metrics, "-o=jsonpath={.spec.template.spec.containers[0].image}"]
    selector = ["get", service, "-o=jsonpath={.spec.selector}"]
    right, began = [kubectl(job, *image), kubectl(job, *selector)], time.monotonic()
    kubectl(job, "scale", f"deployment/{job.name}-rollout", "--replicas=0")
    kubectl(job, "set", "image", metrics, "metrics=localhost/none:1")
    kubectl(job, "patch", service, "--type=merge", '--patch={"spec": {"selector": {"plaudit.dev/role": "nobody"}}}')
    job.cluster.until("put right", lambda: [kubectl(job, *image), kubectl(job, *selector)] == right)
    job.goes_on()
    tell("children edited: goes on after", time.monotonic() - began)


def test_a_lost_node_is_left_and_its_trainer_goes_on_elsewhere(job: PacedJob, tell: Tell):
    home = node_of(job, "redis")
    lost, attempts = ({"node1", "node2"} - {home}).pop(), counts(job)
    moved, began = {pod["metadata"]["uid"] for pod in job.pods() if pod["spec"]["nodeName"] == lost}, time.monotonic()
    with_trainer = node_of(job, "trainer") == lost
    subprocess.run(harness("kill-node", lost[-1]), check=True)
    try:
        job.cluster.until("left", lambda: not {uid for uid, _ in alive(job)} & moved)
        job.goes_on()
        tell(f"node lost{' with the trainer' * with_trainer}: goes on after", time.monotonic() - began)
    finally:
        subprocess.run(harness("start-node", lost[-1]), check=True)
    job.goes_on()
    assert counts(job) == (attempts[0], attempts[1] + with_trainer)


def alive(job: PacedJob) -> set[tuple[str, str]]:
    """Return uid and node of each pod that is not being deleted."""
    pods = (pod for pod in job.pods() if "deletionTimestamp" not in pod["metadata"])
    return {(pod["metadata"]["uid"], pod["spec"].get("nodeName", "")) for pod in pods}


def test_a_job_whose_redis_has_lost_its_node_waits_for_it(job: PacedJob, tell: Tell):
    home, redis = node_of(job, "redis"), state_of(job, "redis")
    began = time.monotonic()
    subprocess.run(harness("kill-node", home[-1]), check=True)
    try:
        told = {"reason": "NodeLost", "status": "True"}
        job.cluster.until("NodeLost", lambda: told.items() <= job.condition("Degraded").items())
        tell("Redis's node lost: told after", time.monotonic() - began)
        assert job.phase == "Degraded"
        assert state_of(job, "redis") == redis, "never forced away"
    finally:
        began = time.monotonic()
        subprocess.run(harness("start-node", home[-1]), check=True)
    job.goes_on()
    tell("and back: goes on after", time.monotonic() - began)


def test_a_drain_moves_the_job_and_costs_no_restart(job: PacedJob, tell: Tell):
    node, attempts = node_of(job, "trainer"), counts(job)
    began = time.monotonic()
    try:
        options = ["--ignore-daemonsets", "--delete-emptydir-data", "--timeout=150s"]
        job.cluster.kubectl("drain", node, *options)
        tell("drained after", time.monotonic() - began)
        assert not {uid for uid, where in alive(job) if where == node}
        job.goes_on()
        tell("goes on after", time.monotonic() - began)
    finally:
        job.cluster.kubectl("uncordon", node)
    assert counts(job) == (attempts[0], attempts[1] + 1)


def test_suspended_it_holds_only_redis_and_metrics_and_resumed_it_goes_on(job: PacedJob, tell: Tell):
    attempts = counts(job)
    patch = ["patch", "rlj", job.name, "--type=merge", "--patch"]
    kubectl(job, *patch, '{"spec": {"suspend": true}}')
    try:
        job.cluster.until("suspended", lambda: job.phase == "Suspended")
        there = [pod for pod in job.pods() if pod["status"]["phase"] not in ("Succeeded", "Failed")]
        assert {pod["metadata"]["labels"]["plaudit.dev/role"] for pod in there} == {"redis", "metrics"}
    finally:
        kubectl(job, *patch, '{"spec": {"suspend": false}}')
    tell("resumed: goes on after", job.goes_on())
    assert counts(job) == attempts


def test_of_three_rollouts_one_with_the_least_work_leaves(job: PacedJob, tell: Tell):
    attempts, costs = counts(job), dict[str, int]()

    def are_ready(rollouts: int) -> bool:
        for pod in job.pods("rollout"):
            cost = pod["metadata"].get("annotations", {}).get("controller.kubernetes.io/pod-deletion-cost")
            costs.update({pod["metadata"]["name"]: int(cost)} if cost is not None else {})
        ready: str = job.status["replicas"]["rollout"]
        return ready == f"{rollouts}/{rollouts}" and len(job.pods("rollout")) == rollouts

    kubectl(job, "scale", "rlj", job.name, "--replicas=3")
    job.cluster.until("three rollouts", lambda: are_ready(3))
    assert costs == {}
    tell("one rollout more: goes on after", job.goes_on(rollouts=3))
    before = {pod["metadata"]["name"] for pod in job.pods("rollout")}
    kubectl(job, "scale", "rlj", job.name, "--replicas=2")
    job.cluster.until("two rollouts", lambda: are_ready(2))
    (left,) = before - {pod["metadata"]["name"] for pod in job.pods("rollout")}
    assert costs.keys() == before
    assert costs[left] == min(costs.values())
    tell("one rollout less: goes on after", job.goes_on())
    assert counts(job) == attempts


def test_several_at_once_at_random(job: PacedJob, tell: Tell):
    draw = random.Random(SEED)
    for _ in range(3):
        struck = draw.sample(ROLES, draw.randint(2, 3))
        before, began = state_of(job, *struck), time.monotonic()
        for role in struck:
            draw.choice([delete_by_force, kill_process])(job, draw.choice(job.pods(role)))
            time.sleep(draw.uniform(0, 2))
        job.cluster.until("their ends", lambda: len(before - state_of(job, *struck)) >= len(struck))  # noqa: B023
        job.goes_on()
        tell(f"{', '.join(struck)} (seed {SEED}): goes on after", time.monotonic() - began)


def test_in_the_end_it_was_trained_on_the_same_prompts_as_in_peace_each_once(job: PacedJob, tell: Tell):
    began = time.monotonic()
    status = job.finish()
    tell("the remaining steps", time.monotonic() - began)
    assert status["phase"] == "Complete", status["conditions"]
    ledger = job.ledger()
    assert ledger["problems"] == []
    assert ledger["open"] == 0
    assert ledger["admitted"] == ledger["trained"] + ledger["evaluated"] + ledger["dropped"]
    assert ledger["trained"] == STEPS * PROMPTS
    in_peace = [(position, index) for position in range(STEPS * PROMPTS) for index in range(SAMPLES)]
    assert job.trained_samples() == in_peace
    assert not ledger.get("poison")
