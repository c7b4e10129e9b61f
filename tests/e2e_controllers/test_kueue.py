"""Jobs in a queue of a real Kueue: admitted whole, kept through faults, preempted and taken back.

The pods only start and idle. The quota is six GPUs and a job needs five, one of them for its reward model.
``PLAUDIT_KUEUE_FAULTS`` is the number of random faults (default 5), ``PLAUDIT_KUEUE_SEED`` the seed of the draw.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from idle_jobs import NAMESPACE
from queued_jobs import GPUS_OF_A_JOB, PODS_OF_A_JOB, Faults, QueuedJobs, jobs_in_a_queue, queued_job
from real_cluster import Cluster

pytestmark = pytest.mark.timeout(7200)

_FAULTS_OF_A_JOB = 5
"""Then another job takes its place: attempts that end early follow each other more and more slowly."""


@pytest.fixture(scope="module")
def jobs(definition: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[QueuedJobs]:
    """Yield a namespace with Kueue's queue ``team`` and an operator of its own."""
    with jobs_in_a_queue(definition, tmp_path_factory.mktemp("kueue")) as jobs:
        yield jobs


def test_a_job_is_admitted_whole_and_the_quota_covers_its_reward_model(jobs: QueuedJobs):
    jobs.make(queued_job("left"))
    jobs.until_running("left")
    assert jobs.bound("left") == PODS_OF_A_JOB
    assert jobs.reserved() == GPUS_OF_A_JOB
    (workload,) = jobs.cluster.get("workloads.kueue.x-k8s.io", "", NAMESPACE)["items"]
    assert workload["metadata"]["name"] == jobs.status("left")["run"]
    assert sum(pods["count"] for pods in workload["spec"]["podSets"]) == PODS_OF_A_JOB


def test_a_job_beyond_the_quota_waits_whole_and_holds_nothing(jobs: QueuedJobs):
    jobs.arrange(runs="left", waits="right")
    assert jobs.status("right")["phase"] == "Suspended"
    assert jobs.reserved() == GPUS_OF_A_JOB


@pytest.mark.parametrize("role", ["rollout", "model", "redis", "trainer"])
def test_a_lost_pod_is_replaced_within_the_quota_of_its_job(jobs: QueuedJobs, role: str):
    jobs.arrange(runs="left", waits="right")
    others = {
        pod["metadata"]["uid"] for pod in jobs.pods("left") if pod["metadata"]["labels"]["plaudit.dev/role"] != role
    }
    jobs.delete_pod("left", role)
    jobs.cluster.until("replaced", lambda: jobs.bound("left") == PODS_OF_A_JOB, 120)
    jobs.until_running("left")
    assert others <= {pod["metadata"]["uid"] for pod in jobs.pods("left")}
    assert (jobs.bound("right"), jobs.reserved()) == (0, GPUS_OF_A_JOB)
    assert jobs.status("left")["restarts"] == 0


def test_a_suspended_job_frees_its_quota_for_the_next_and_waits_behind_it_when_resumed(jobs: QueuedJobs):
    jobs.arrange(runs="left", waits="right")
    jobs.edit("left", '{"suspend": true}')
    jobs.until_running("right")
    assert not jobs.pods("left")
    jobs.edit("left", '{"suspend": false}')
    jobs.until_queued("left")
    assert jobs.reserved() == GPUS_OF_A_JOB


def test_a_job_of_higher_priority_preempts_the_whole_job_which_returns_after_it(jobs: QueuedJobs):
    jobs.arrange(runs="right", waits="left")
    disruptions = jobs.status("right")["disruptions"]
    jobs.make(queued_job("urgent", "urgent"))
    jobs.until_running("urgent")
    jobs.until_queued("right")
    status = jobs.status("right")
    assert (status["restarts"], status["disruptions"]) == (0, disruptions + 1)
    jobs.delete("left", "urgent")
    jobs.until_running("right")
    assert jobs.bound("right") == PODS_OF_A_JOB


def test_a_job_that_completes_frees_its_quota(jobs: QueuedJobs):
    jobs.arrange(runs="right", waits="next")
    jobs.delete("right")
    jobs.until_running("next")
    jobs.make(queued_job("short", "urgent", ends=True))
    jobs.cluster.until("complete", lambda: jobs.status("short").get("phase") == "Complete", 120)
    jobs.until_running("next")
    jobs.delete("short", "next")
    jobs.cluster.until("the quota is free", lambda: jobs.reserved() == 0, 60)


def test_random_faults_never_leave_a_group_stuck(jobs: QueuedJobs):
    seed = int(os.environ.get("PLAUDIT_KUEUE_SEED", "1"))
    faults, count = Faults(jobs, seed), int(os.environ.get("PLAUDIT_KUEUE_FAULTS", "5"))
    for number in range(count):
        name = f"faults-{number // _FAULTS_OF_A_JOB}"
        if number % _FAULTS_OF_A_JOB == 0:
            jobs.delete_all()
            jobs.make(queued_job(name))
            jobs.until_running(name)
        fault = faults.inject(name)
        print(f"{number}: {fault}: running again after {jobs.until_whole(name):.0f} s")
        assert jobs.bound(name) == PODS_OF_A_JOB, fault
        assert jobs.reserved() == GPUS_OF_A_JOB, fault
