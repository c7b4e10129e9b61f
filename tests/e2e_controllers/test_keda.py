"""KEDA scales reward workers: up with the work, down after it, never below what workers hold."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from real_cluster import Cluster
from scoring_job import NAMESPACE, SLOTS, Measured, ScoringJob, Watch, asked, judged

pytestmark = pytest.mark.timeout(1200)  # programs are built, and workers drain

MOST = 4
QUIET_S = 10
AUTOSCALING = {
    "provider": "keda",
    "minReplicas": 1,
    "maxReplicas": MOST,
    "samplesPerReplica": SLOTS,
    "scaleDownAfterSeconds": QUIET_S,
}


@pytest.fixture(scope="module")
def job(keda: Cluster) -> Iterator[ScoringJob]:
    with ScoringJob(keda, "scaled", AUTOSCALING) as job:
        yield job


def test_keda_asks_redis_with_the_password_of_its_user(job: ScoringJob):
    job.cluster.until("ready", lambda: _condition(job, "Ready") == "True", 120)
    authentication = job.cluster.get("triggerauthentication", f"{job.name}-reward", NAMESPACE)
    assert {item["key"] for item in authentication["spec"]["secretTargetRef"]} >= {"keda"}


def test_workers_come_with_the_work_and_go_after_it(job: ScoringJob, measured: Measured):
    samples = judged("many", 240, 4)
    with Watch(job) as watch, job.load(samples) as load:
        job.cluster.until("the most workers", lambda: job.replicas == MOST, 120)
        measured(f"KEDA: 1 to {MOST} workers", watch.seconds)
        load.finish(300)
        finished_s = watch.seconds
        job.cluster.until("one worker", lambda: job.replicas == 1, 180)
        measured(f"KEDA: {MOST} to 1 after {QUIET_S} s of quiet", watch.seconds - finished_s)
    assert watch.too_few(SLOTS, since=MOST) == []
    counts = asked(job.cluster)
    assert {counts[sample["id"]] for sample in samples} == {1}
    assert not [name for name in job.writers_of_replicas if name.startswith("plaudit-operator")]


def test_work_that_is_read_and_not_done_holds_its_workers(job: ScoringJob):
    samples = judged("held", 20, 45)
    with Watch(job) as watch, job.load(samples) as load:
        job.cluster.until("all in work", lambda: job.held == len(samples), 120)
        assert job.replicas >= 3
        load.finish(180)
    assert watch.too_few(SLOTS, since=3) == []
    beyond_s = next(look.at_s for look in watch.looks if look.replicas == 3) + 2 * QUIET_S
    assert any(look.at_s > beyond_s and look.in_work > 2 * SLOTS for look in watch.looks)


def test_stopped_workers_finish_or_release_their_samples(job: ScoringJob):
    job.patch(reward={"workers": {"autoscaling": {"minReplicas": 3}}})
    job.cluster.until("three workers", lambda: job.ready == 3, 120)
    short, long = judged("short", 9, 12), judged("long", 9, 45)
    samples = [sample for pair in zip(short, long, strict=True) for sample in pair]
    with job.load(samples) as load:
        job.cluster.until("all in work", lambda: job.held == len(samples), 60)
        job.patch(reward={"workers": {"autoscaling": {"minReplicas": 1, "samplesPerReplica": 100}}})
        job.cluster.until("one worker", lambda: job.replicas == 1, 120)
        assert job.held > 0
        load.finish(300)
    counts = asked(job.cluster)
    assert {counts[sample["id"]] for sample in short} == {1}
    assert {counts[sample["id"]] for sample in long} == {1, 2}  # one worker cannot have held all nine
    assert job.figure("plaudit_duplicates_total") == 0
    job.patch(reward={"workers": {"autoscaling": {"samplesPerReplica": SLOTS}}})


def test_a_suspended_job_has_no_workers_and_keeps_its_work(job: ScoringJob):
    with job.load(judged("asleep", 40, 4)) as load:
        job.cluster.until("work", lambda: job.held > 0, 60)
        job.patch(suspend=True)
        job.cluster.until("no workers", lambda: job.replicas == 0, 60)
        paused = job.cluster.get("scaledobject", "scaled-reward", NAMESPACE)
        assert paused["metadata"]["annotations"]["autoscaling.keda.sh/paused-replicas"] == "0"
        job.cluster.until("drained", lambda: job.held == 0, 90)
        waiting = job.in_work
        assert waiting > 0
        job.cluster.until("told to be paused", lambda: _condition(job, "Paused") == "True", 60)
        assert (job.replicas, job.in_work) == (0, waiting)
        job.patch(suspend=False)
        load.finish(180)
    assert job.replicas >= 1
    assert not [name for name in job.writers_of_replicas if name.startswith("plaudit-operator")]


def test_workers_stay_while_redis_is_away(job: ScoringJob):
    job.patch(reward={"workers": {"autoscaling": {"minReplicas": 3}}})
    job.cluster.until("three workers", lambda: job.ready == 3, 120)
    nodes = [node["metadata"]["name"] for node in job.cluster.get("nodes")["items"]]
    try:
        job.cluster.kubectl("cordon", *nodes)  # so that it does not come back
        job.cluster.kubectl("--namespace", NAMESPACE, "delete", "pod", f"{job.name}-redis-0")
        job.patch(reward={"workers": {"autoscaling": {"minReplicas": 1}}})
        job.cluster.until("nobody can tell the work", lambda: _is_blind(job), 120)
        assert job.replicas == 3
    finally:
        job.cluster.kubectl("uncordon", *nodes)
    job.cluster.until("KEDA asks again", lambda: not _is_blind(job), 120)
    job.cluster.until("one worker", lambda: job.replicas == 1, 120)


def test_a_keda_without_figures_is_reported(job: ScoringJob):
    with job.without("keda", "keda-metrics-apiserver"):
        job.cluster.until("told", lambda: job.condition("Degraded")["reason"] == "AutoscalerFailing", 360)
        assert f"ScaledObject {job.name}-reward cannot follow the load" in job.condition("Degraded")["message"]
    job.cluster.until("right again", lambda: job.condition("Degraded")["status"] == "False", 240)


def test_workers_of_a_reward_service_come_with_the_work_and_go_after_it(keda: Cluster, measured: Measured):
    samples = judged("service", 120, 4)
    with ScoringJob(keda, "service", AUTOSCALING, kind="RewardService") as service:
        with Watch(service) as watch, service.load(samples) as load:
            service.cluster.until("the most workers", lambda: service.replicas == MOST, 120)
            measured(f"KEDA, RewardService: 1 to {MOST} workers", watch.seconds)
            load.finish(300)
            finished_s = watch.seconds
            service.cluster.until("one worker", lambda: service.replicas == 1, 180)
            measured(f"KEDA, RewardService: {MOST} to 1 after {QUIET_S} s of quiet", watch.seconds - finished_s)
        assert watch.too_few(SLOTS, since=MOST) == []
        counts = asked(keda)
        assert {counts[sample["id"]] for sample in samples} == {1}
        assert not [name for name in service.writers_of_replicas if name.startswith("plaudit-operator")]


def _is_blind(job: ScoringJob) -> bool:
    """Return True if the HPA gets no metric from KEDA, which waits long for a lost Redis, or only the fallback."""
    active = job.cluster.condition("hpa", f"keda-hpa-{job.name}-reward", NAMESPACE, "ScalingActive")
    return active.get("status") == "False" or _condition(job, "Fallback") == "True"


def _condition(job: ScoringJob, kind: str) -> str:
    """Return the status of a condition of the ScaledObject."""
    return str(job.cluster.condition("scaledobject", f"{job.name}-reward", NAMESPACE, kind).get("status", ""))
