"""A job that starts as a gang: one PodGroup for trainer, rollouts and Redis, everything else after it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from cluster_model import ClusterModel
from world import World, rljob, settled

from plaudit_operator.names import ConditionType
from plaudit_operator.runtime.kube import InvalidError, NotFoundError

GANG = {"gang": "native"}
FSDP = {"ranks": 4, "ranksPerPod": 2, "strategy": "fsdp2"}


def gang(**spec: Any) -> dict[str, Any]:
    """A job whose gang is two pods of the trainer, two rollouts and Redis."""
    return rljob(**{"scheduling": GANG, "trainer": FSDP, **spec})


def test_only_trainer_rollouts_and_redis_join_the_pod_group():
    world = World(gang())
    world.settle()
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
    world = World(gang(transport={"url": "redis://elsewhere:6379/0"}))
    world.settle()
    assert world.cluster.of_kind("PodGroup")[0]["spec"]["schedulingPolicy"]["gang"]["minCount"] == 4


def test_a_gang_counts_the_reward_models_that_were_in_it_when_the_job_was_admitted():
    reward = rljob()["spec"]["reward"]
    scorer = {"name": "rm", "kind": "model", "model": {"source": "/plaudit/rm", "replicas": 2}}
    world = World(gang(reward=reward | {"scorers": [*reward["scorers"], scorer]}))
    world.settle()
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
    world = World(gang())
    world.settle()
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
    world = World(gang())
    world.settle()
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
    world = World(gang())
    world.settle()
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
        world.deliver()
        world.reconcile()
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
    for _ in range(3):
        world.deliver()
        world.reconcile()
    assert world.condition(ConditionType.ADMITTED)["reason"] == "RefusedByCluster"
    assert not world.cluster.of_kind("StatefulSet")


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
