"""Jobs that start all or nothing: as a gang, or in a queue, on a model of Kueue's pod groups.

tests/e2e_controllers/test_kueue.py has the same on Kueue.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from cluster_model import ClusterModel
from world import World, rljob, settled

from plaudit_operator.names import ConditionType
from plaudit_operator.observed import Observed, labels, timestamp
from plaudit_operator.policies import awaited
from plaudit_operator.runtime.kube import InvalidError, NotFoundError

GANG = {"gang": "native"}
FSDP = {"ranks": 4, "ranksPerPod": 2, "strategy": "fsdp2"}


def gang(**spec: Any) -> dict[str, Any]:
    """A job whose gang is two pods of the trainer, two rollouts and Redis."""
    return rljob(**{"scheduling": GANG, "trainer": FSDP, **spec})


def test_only_trainer_rollouts_and_redis_join_the_pod_group():
    world = settled(gang())
    (group,) = world.cluster.of_kind("PodGroup")
    assert group["metadata"]["name"] == world.status["run"]
    assert group["spec"] == {"schedulingPolicy": {"gang": {"minCount": 5}}}
    owner = group["metadata"]["ownerReferences"][0]
    assert (owner["kind"], owner["uid"]) == ("RLJob", world.job["metadata"]["uid"])
    members = {
        item["metadata"]["name"]
        for kind in ("Deployment", "StatefulSet", "Job")
        for item in world.cluster.of_kind(kind)
        if item["spec"]["template"]["spec"].get("schedulingGroup") == {"podGroupName": world.status["run"]}
    }
    assert members == {"job-redis", "job-rollout", "job-trainer-0"}
    redis = world.cluster.find("StatefulSet", "job-redis")
    assert redis
    assert redis["spec"]["podManagementPolicy"] == "Parallel"


def test_a_redis_of_somebody_elses_is_not_counted():
    world = settled(gang(transport={"url": "redis://elsewhere:6379/0"}))
    assert world.cluster.of_kind("PodGroup")[0]["spec"]["schedulingPolicy"]["gang"]["minCount"] == 4


def test_a_gang_counts_the_reward_models_that_were_in_it_when_the_job_was_admitted():
    reward = rljob()["spec"]["reward"]
    scorer = {"name": "rm", "kind": "model", "model": {"source": "/plaudit/rm", "replicas": 2}}
    world = settled(gang(reward=reward | {"scorers": [*reward["scorers"], scorer]}))
    (group,) = world.cluster.of_kind("PodGroup")
    assert group["spec"]["schedulingPolicy"]["gang"]["minCount"] == 7

    def of_another_version(config: dict[str, Any]) -> None:
        templates = json.loads(config["data"]["templates.json"])
        del templates["model/rm"]["template"]["spec"]["schedulingGroup"]
        config["data"]["templates.json"] = json.dumps(templates)

    world.cluster.edit("ConfigMap", "job-job", of_another_version)
    world.start_operator()
    world.settle()
    (group,) = world.cluster.of_kind("PodGroup")
    assert group["spec"]["schedulingPolicy"]["gang"]["minCount"] == 5


def test_a_job_without_gang_has_no_pod_group():
    world = settled()
    assert not world.cluster.of_kind("PodGroup")


def test_the_group_is_there_before_any_pod():
    world = settled(gang())
    made = [call for call in world.cluster.calls if call.startswith("create")]
    workloads = [i for i, call in enumerate(made) if call.split()[1] in ("Deployment", "StatefulSet", "Job")]
    assert made.index(f"create PodGroup {world.status['run']}") < min(workloads)


class NoRoom(ClusterModel):
    """A cluster whose scheduler places no gang until it has room."""

    room = False

    def schedules(self, pod: dict[str, Any]) -> dict[str, Any] | None:
        """Nothing of a gang, while there is no room for it."""
        if self.room or "schedulingGroup" not in pod["spec"]:
            return None
        return {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes"}


def waiting(job: dict[str, Any]) -> World:
    """A world in which the gang does not fit."""
    cluster = NoRoom()
    cluster.put(job)
    world = World(cluster=cluster)
    world.settle()
    return world


def test_while_the_gang_waits_everything_outside_it_rests():
    world = waiting(gang())
    assert world.cluster.roles() == {"trainer", "rollout", "redis", "metrics"}
    assert world.condition(ConditionType.REWARD_READY)["reason"] == "WaitingForRoom"
    assert world.condition(ConditionType.ROLLOUT_READY)["reason"] == "Unschedulable"
    assert "0/2 nodes" in world.condition(ConditionType.TRAINER_RUNNING)["message"]
    assert world.status["phase"] == "Starting"
    assert "startTime" not in world.status
    world.cluster.calls.clear()
    world.reconcile()
    assert world.cluster.calls == []  # nothing is written while it waits
    world.cluster.room = True
    world.settle()
    assert world.status["phase"] == "Running"
    assert world.status["replicas"] == {"rollout": "2/2", "reward": "2/2"}


@pytest.mark.parametrize("provider", ["keda", "hpa"])
def test_autoscaled_workers_wait_too(provider: str):
    workers = {
        "autoscaling": {"provider": provider, "minReplicas": 2},
        "pod": {"resources": {"requests": {"cpu": "1"}}},
    }
    world = waiting(gang(reward=rljob()["spec"]["reward"] | {"workers": workers}))
    assert world.status["replicas"]["reward"] == "0/0"
    if provider == "keda":
        scaled = world.cluster.find("ScaledObject", "job-reward")
        assert scaled
        assert scaled["metadata"]["annotations"]["autoscaling.keda.sh/paused-replicas"] == "0"
    world.cluster.room = True
    world.settle()
    scaled = world.cluster.find("ScaledObject", "job-reward")
    assert not (scaled and "autoscaling.keda.sh/paused-replicas" in scaled["metadata"]["annotations"])
    assert provider == "keda" or world.status["replicas"]["reward"] == "2/2"


def test_a_gang_that_never_fits_is_given_up_with_its_shortage_and_holds_no_capacity():
    world = waiting(gang(lifecycle={"preRunningDeadlineSeconds": 60}))
    world.cluster.now += 61
    world.settle()
    failed = world.condition(ConditionType.FAILED)
    assert failed["reason"] == "PreRunningDeadlineExceeded"
    assert "rollout 0/2" in failed["message"]
    assert "0/2 nodes" in failed["message"]
    assert not world.cluster.of_kind("Pod")
    assert {kind for kind, _ in world.children()} == {"Secret"}


def test_a_next_attempt_of_the_trainer_joins_the_same_group():
    world = settled(gang())
    (before,) = world.cluster.of_kind("PodGroup")
    kept = {pod["metadata"]["uid"] for pod in world.cluster.of_kind("Pod") if "trainer" not in pod["metadata"]["name"]}
    world.cluster.end_trainer(1, "boom")
    world.settle()
    (after,) = world.cluster.of_kind("PodGroup")
    assert after == before
    (job,) = world.cluster.of_kind("Job")
    assert job["metadata"]["name"] == "job-trainer-1"
    assert job["spec"]["template"]["spec"]["schedulingGroup"] == {"podGroupName": world.status["run"]}
    assert kept < {pod["metadata"]["uid"] for pod in world.cluster.of_kind("Pod")}


def test_a_suspended_gang_gives_back_redis_as_well_and_waits_whole_when_it_is_resumed():
    world = waiting(gang())
    world.cluster.room = True
    world.settle()
    suspend(world, True)
    world.settle()
    assert world.cluster.roles() == {"metrics"}
    assert world.status["phase"] == "Suspended"
    world.cluster.room = False
    suspend(world, False)
    world.settle()
    assert world.condition(ConditionType.REWARD_READY)["reason"] == "WaitingForRoom"
    world.cluster.room = True
    world.settle()
    assert world.status["phase"] == "Running"
    assert world.status["restarts"] == 0


def suspend(world: World, value: bool) -> None:
    world.cluster.edit("RLJob", "job", lambda job: job["spec"].update(suspend=value))


def test_the_size_of_a_gang_is_fixed():
    world = settled(gang())
    world.cluster.edit("RLJob", "job", lambda job: job["spec"]["rollout"].update(replicas=5))
    world.settle()
    assert world.status["replicas"]["rollout"] == "2/2"
    assert world.condition(ConditionType.SPEC_VALID)["reason"] == "ImmutableFieldChanged"
    assert "spec.rollout.replicas" in world.condition(ConditionType.SPEC_VALID)["message"]


def test_without_pod_groups_nothing_is_started_and_the_remedy_is_shown():
    world = World(gang())

    def lacks(call: str) -> None:
        if call.startswith("create PodGroup"):
            raise NotFoundError("HTTP 404", 404)

    world.cluster.before = lacks
    for _ in range(5):
        world.learn()
        world.cluster.run_controllers()
    admitted = world.condition(ConditionType.ADMITTED)
    assert admitted["reason"] == "GangUnavailable"
    assert "GenericWorkload" in admitted["message"]
    assert world.status["phase"] == "Pending"
    assert not world.cluster.of_kind("Pod")
    world.cluster.before = lambda call: None
    world.settle()
    assert world.status["phase"] == "Running"


def test_a_group_that_may_not_be_made_starts_nothing_either():
    world = World(gang())

    def forbids(call: str) -> None:
        if call.startswith("create PodGroup"):
            raise InvalidError("podgroups is forbidden", 403)

    world.cluster.before = forbids
    world.learn(3)
    assert world.condition(ConditionType.ADMITTED)["reason"] == "RefusedByCluster"
    assert not world.cluster.of_kind("StatefulSet")


@pytest.mark.long
def test_the_operator_killed_at_every_call_of_a_gangs_start_ends_in_the_same_state():
    class KilledError(BaseException):
        pass

    before = NoRoom()
    before.put(gang())
    undisturbed = World(cluster=copy.deepcopy(before))

    def live(world: World) -> None:
        world.settle()
        world.cluster.room = True
        world.settle()

    live(undisturbed)
    calls = len(undisturbed.cluster.calls)
    for number in range(1, calls + 1):
        world = World(cluster=copy.deepcopy(before))

        def kill(call: str, world: World = world, number: int = number) -> None:
            if len(world.cluster.calls) == number:
                raise KilledError(call)

        world.cluster.after = kill
        try:
            live(world)
        except KilledError:
            world.start_operator()
            live(world)
        assert world.children() == undisturbed.children()
        assert world.status["phase"] == "Running"
        assert len(world.cluster.of_kind("Pod")) == len(undisturbed.cluster.of_kind("Pod"))


QUEUE, GROUP = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/pod-group-name"
COUNT, PARENT = "kueue.x-k8s.io/pod-group-total-count", "kueue.x-k8s.io/pod-suspending-parent"
MANAGED, GATE = "kueue.x-k8s.io/managed", "kueue.x-k8s.io/admission"
ENDED = ("Succeeded", "Failed")


class Kueue(ClusterModel):
    """A cluster with Kueue: pods wait at its gate until their group is whole and has its quota; preempted, all of the
    group is told (TerminationTarget) and deleted, and whoever made the pods makes others.

    Args:
        keeps: deleted pods stay, ended, until others take their place (the finalizer of versions before 0.13).
    """

    def __init__(self, *, keeps: bool = False) -> None:
        super().__init__()
        self.keeps = keeps
        self.quota = False
        self._admitted: set[str] = set()

    def group(self) -> list[dict[str, Any]]:
        """Pods of the group whose processes have not ended."""
        return [p for p in self.of_kind("Pod") if GROUP in labels(p) and p["status"].get("phase") not in ENDED]

    def schedules(self, pod: dict[str, Any]) -> dict[str, Any] | None:
        """Gated until admitted."""
        gated = {"name": GATE} in pod["spec"].get("schedulingGates", [])
        if not gated or pod["metadata"]["uid"] in self._admitted:
            return None
        return {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}

    def run_controllers(self) -> None:
        """The cluster's own, then Kueue's."""
        super().run_controllers()
        group = self.group()
        counts = {int(pod["metadata"]["annotations"][COUNT]) for pod in group}
        assert len(counts) <= 1, "a group says one count"
        assert not counts or len(group) <= min(counts), "Kueue would delete the excess"
        if self.quota and counts and len(group) == min(counts):
            self._admitted |= {pod["metadata"]["uid"] for pod in group}
            super().run_controllers()

    def preempt(self) -> None:
        """Takes the quota from the group and ends its pods."""
        self.quota = False
        told = {"type": "TerminationTarget", "status": "True", "reason": "Preempted"}
        for pod in self.group():
            container = labels(pod)["plaudit.dev/role"]
            ended = {"name": container, "restartCount": 0, "state": {"terminated": {"exitCode": 137}}}
            status = {"phase": "Failed", "conditions": [told], "containerStatuses": [ended]}
            gone = copy.deepcopy(pod) | {"status": status}
            gone["metadata"]["deletionTimestamp"] = timestamp(self.now)
            self.put(gone)
            if container != "trainer":  # a Job's own finalizer holds its pods until they are counted
                self.remove("Pod", pod["metadata"]["name"])


def queued(**spec: Any) -> tuple[World, Kueue]:
    """A job of one pod of the trainer, two rollouts and Redis that waits in queue ``team``."""
    kueue = Kueue()
    kueue.put(rljob(**{"scheduling": {"queueName": "team"}, **spec}))
    world = World(cluster=kueue)
    world.settle()
    return world, kueue


def test_only_trainer_rollouts_and_redis_are_in_the_queued_group():
    world, kueue = queued()
    assert [labels(pod)["plaudit.dev/role"] for pod in kueue.group()] == ["redis", "rollout", "rollout", "trainer"]
    for pod in kueue.group():
        marks, annotations = labels(pod), pod["metadata"]["annotations"]
        assert (marks[QUEUE], marks[MANAGED], marks[GROUP]) == ("team", "true", world.status["run"])
        assert (annotations[COUNT], annotations[PARENT]) == ("4", "plaudit.dev/rljob")
        assert annotations["kueue.x-k8s.io/pod-group-serving"] == "true"
        assert pod["spec"]["schedulingGates"] == [{"name": GATE}]
    for kind in ("Deployment", "StatefulSet", "Job"):
        # The objects themselves are not Kueue's: it would make a group of its own of each.
        assert not any(QUEUE in labels(item) for item in kueue.of_kind(kind))
    assert not kueue.of_kind("PodGroup")


def test_a_job_in_its_queue_is_suspended_and_starts_when_it_is_admitted():
    world, kueue = queued()
    assert kueue.roles() == {"trainer", "rollout", "redis", "metrics"}
    suspended = world.condition(ConditionType.SUSPENDED)
    assert (world.status["phase"], suspended["reason"]) == ("Suspended", "Queued")
    assert f"workloads.kueue.x-k8s.io {world.status['run']}" in suspended["message"]
    kueue.quota = True
    world.settle()
    assert world.status["phase"] == "Running"
    assert kueue.roles() == {"trainer", "rollout", "redis", "metrics", "reward"}


def test_a_reward_models_pods_are_part_of_the_group_and_wait_in_the_queue_as_well():
    reward = rljob()["spec"]["reward"]
    scorer = {"name": "rm", "kind": "model", "model": {"source": "/plaudit/rm", "replicas": 2}}
    world, kueue = queued(reward=reward | {"scorers": [*reward["scorers"], scorer]})
    roles = [labels(pod)["plaudit.dev/role"] for pod in kueue.group()]
    assert roles == ["model", "model", "redis", "rollout", "rollout", "trainer"]
    assert {pod["metadata"]["annotations"][COUNT] for pod in kueue.group()} == {"6"}
    assert world.condition(ConditionType.SUSPENDED)["reason"] == "Queued"
    kueue.quota = True
    world.settle()
    assert world.status["phase"] == "Running"
    kueue.preempt()
    world.settle()
    assert (world.status["phase"], len(kueue.group())) == ("Suspended", 6)
    change(world, suspend=True)
    assert not kueue.group()


def test_time_in_the_queue_counts_for_no_deadline():
    world, kueue = queued(lifecycle={"preRunningDeadlineSeconds": 60, "activeDeadlineSeconds": 100})
    kueue.now += 100_000
    world.settle()
    assert world.status["phase"] == "Suspended"
    kueue.quota = True
    world.settle()
    kueue.now += 90
    kueue.preempt()
    world.settle()
    kueue.now += 100_000
    kueue.quota = True
    world.settle()
    kueue.now += 90
    world.settle()
    assert world.status["phase"] == "Running"
    kueue.now += 20
    world.settle()
    assert world.condition(ConditionType.FAILED)["reason"] == "ActiveDeadlineExceeded"


def test_a_preempted_job_waits_anew_and_goes_on_and_that_costs_no_restart():
    world, kueue = queued(lifecycle={"failurePolicy": {"maxRestarts": 0}})
    for attempt in (1, 2):
        kueue.quota = True
        world.settle()
        assert world.status["phase"] == "Running"
        kueue.preempt()
        world.settle()
        assert (world.status["phase"], world.condition(ConditionType.SUSPENDED)["reason"]) == ("Suspended", "Queued")
        assert not any(labels(pod)["plaudit.dev/role"] == "reward" for pod in kueue.of_kind("Pod"))
        assert len(kueue.group()) == 4
        assert (world.status["restarts"], world.status["disruptions"]) == (0, attempt)
    kueue.quota = True
    world.settle()
    assert world.status["phase"] == "Running"
    assert [job["metadata"]["name"] for job in kueue.of_kind("Job")] == ["job-trainer-2"]


def test_a_failed_attempt_stays_within_the_admitted_group():
    world, kueue = queued()
    kueue.quota = True
    world.settle()
    rollouts = [pod["metadata"]["uid"] for pod in kueue.group() if "rollout" in pod["metadata"]["name"]]
    kueue.end_trainer(1, "boom")
    world.settle()
    assert (world.status["phase"], world.status["restarts"]) == ("Running", 1)
    assert [pod["metadata"]["uid"] for pod in kueue.group() if "rollout" in pod["metadata"]["name"]] == rollouts


BOUND = {"type": "PodScheduled", "status": "True"}
GATED = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
FULL = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}


@pytest.mark.parametrize(
    ("scheduling", "pods", "waits"),
    [
        ({}, [("rollout", GATED, "Pending")], ""),
        ({"queueName": "team"}, [], "queue"),
        ({"gang": "native"}, [], "room"),
        ({"queueName": "team"}, [("rollout", GATED, "Pending"), ("trainer", FULL, "Pending")], "queue"),
        ({"queueName": "team"}, [("rollout", FULL, "Pending"), ("trainer", FULL, "Pending")], "room"),
        ({"queueName": "team"}, [("rollout", BOUND, "Running"), ("trainer", GATED, "Pending")], ""),
        ({"gang": "native"}, [("rollout", FULL, "Pending"), ("redis", BOUND, "Running")], "room"),
        # Preempted: what was bound ends, and what takes its place waits.
        ({"queueName": "team"}, [("rollout", BOUND, "leaving"), ("rollout", GATED, "Pending")], "queue"),
        ({"queueName": "team"}, [("trainer", BOUND, "Failed"), ("rollout", GATED, "Pending")], "queue"),
        ({"gang": "native"}, [("trainer", BOUND, "Failed")], "room"),
    ],
)
def test_a_job_has_its_place_while_a_pod_of_its_gang_stays_on_a_node(
    scheduling: dict[str, str], pods: list[tuple[str, dict[str, str], str]], waits: str
):
    found = []
    for role, condition, phase in pods:
        leaves = {"deletionTimestamp": timestamp(0)} if phase == "leaving" else {}
        metadata = {"name": role, "labels": {"plaudit.dev/role": role}, **leaves}
        found.append({"metadata": metadata, "status": {"phase": phase, "conditions": [condition]}})
    assert awaited(Observed({"spec": {"scheduling": scheduling}}, pods=tuple(found))) == waits


def test_suspension_gives_the_whole_quota_back():
    world, kueue = queued()
    kueue.quota = True
    world.settle()
    change(world, suspend=True)
    assert not kueue.group()
    assert world.condition(ConditionType.SUSPENDED)["reason"] == "SuspendedByUser"
    kueue.quota = False
    change(world, suspend=False)
    assert world.condition(ConditionType.SUSPENDED)["reason"] == "Queued"
    kueue.quota = True
    world.settle()
    assert world.status["phase"] == "Running"


def change(world: World, **sections: Any) -> None:
    """Changes the job as its user would, and lets everything follow."""
    update: Callable[[dict[str, Any]], None] = lambda job: job["spec"].update(sections)  # noqa: E731
    world.cluster.edit("RLJob", "job", update)
    world.settle()


def test_the_size_of_a_group_is_fixed():
    world, kueue = queued()
    change(world, rollout={"replicas": 5})
    assert len(kueue.group()) == 4
    assert "spec.rollout.replicas" in world.condition(ConditionType.SPEC_VALID)["message"]


def test_admitted_without_room_its_deadline_counts_again():
    world, kueue = queued(lifecycle={"preRunningDeadlineSeconds": 60})
    kueue.quota = True
    full = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes"}
    gate = kueue.schedules
    kueue.schedules = lambda pod: gate(pod) or (full if GROUP in labels(pod) else None)  # type: ignore[method-assign]
    world.settle()
    assert world.condition(ConditionType.ROLLOUT_READY)["reason"] == "Unschedulable"
    assert world.status["phase"] == "Starting"
    kueue.now += 61
    world.settle()
    assert world.condition(ConditionType.FAILED)["reason"] == "PreRunningDeadlineExceeded"
    assert not kueue.group()
