"""What a plan does to pods: a deleted job's trainer saves first, and rollouts with the least work in flight leave."""

from __future__ import annotations

from typing import Any

import pytest
from world import World, rljob, settled

from plaudit_operator import names
from plaudit_operator.names import ConditionType
from plaudit_operator.observed import annotations_of, labels
from plaudit_operator.runtime.kube import error_of


def trainer_of(world: World) -> dict[str, Any]:
    (pod,) = (pod for pod in world.cluster.of_kind("Pod") if "job-trainer" in pod["metadata"]["name"])
    return pod


def deleted_while_the_trainer_saves() -> World:
    """Return a world whose job was deleted; the trainer's pod has its grace period, as all Redis's objects."""
    world = settled()
    pod = trainer_of(world)

    def terminating(pod: dict[str, Any]) -> None:
        pod["metadata"] |= {"ownerReferences": [], "deletionGracePeriodSeconds": 600}

    world.cluster.edit("Pod", pod["metadata"]["name"], terminating)
    world.cluster.remove("RLJob", "job")
    return world


def test_redis_stays_until_the_trainers_pod_is_gone_and_everything_else_goes_at_once():
    world = deleted_while_the_trainer_saves()
    assert world.children() == {("StatefulSet", "job-redis"), ("Service", "job-redis")}
    assert world.cluster.roles() == {"trainer", "redis"}
    world.cluster.remove("Pod", trainer_of(world)["metadata"]["name"])
    assert (world.children(), world.cluster.roles()) == (set(), set())


def test_the_trainer_of_a_deleted_job_has_two_minutes_instead_of_ten():
    world = deleted_while_the_trainer_saves()
    world.deliver()
    graces = []
    delete = world.cluster.delete

    def recorded(*arguments: Any) -> None:
        graces.append(arguments[-1])
        delete(*arguments)

    world.cluster.delete = recorded  # type: ignore[method-assign]
    world.reconcile()
    assert graces == [120]
    world.learn()
    assert graces == [120]


def test_a_new_job_of_the_same_name_starts_once_the_old_one_is_gone():
    world = deleted_while_the_trainer_saves()
    old = trainer_of(world)["metadata"]["name"]
    world.cluster.put(rljob())
    world.learn(5)
    assert world.condition(ConditionType.ADMITTED).get("reason") != "NameTaken"
    if world.cluster.find("Pod", old):
        world.cluster.remove("Pod", old)
    world.settle()
    assert world.status["phase"] == "Running"


def test_redis_is_owned_by_the_first_pod_of_the_present_attempt():
    world = settled(trainer={"ranks": 2, "ranksPerPod": 1, "strategy": "fsdp2"})
    for _ in range(2):
        for kind in ("StatefulSet", "Service"):
            redis = world.cluster.find(kind, "job-redis")
            assert redis
            owners = redis["metadata"]["ownerReferences"]
            names = sorted(
                p["metadata"]["name"] for p in world.cluster.of_kind("Pod") if "trainer" in p["metadata"]["name"]
            )
            assert [owner["name"] for owner in owners] == ["job", names[0]]
            assert [owner.get("controller", False) for owner in owners] == [True, False]
        world.cluster.calls.clear()
        world.reconcile()
        assert world.cluster.calls == []
        world.cluster.end_trainer(1, "boom")
        world.settle()


def rollouts(world: World) -> list[str]:
    """Return the names of the pods of rollouts."""
    pods = world.cluster.of_kind("Pod")
    return [pod["metadata"]["name"] for pod in pods if labels(pod)[names.LABEL_ROLE] == "rollout"]


def scale(world: World, replicas: int) -> None:
    world.cluster.calls.clear()
    world.cluster.edit("RLJob", "job", lambda job: job["spec"]["rollout"].update(replicas=replicas))
    world.settle()


def running(**spec: Any) -> World:
    """Return a running job with four rollouts."""
    return settled(**{"rollout": {"replicas": 4}, **spec})


def written_costs(world: World) -> list[str]:
    return [call for call in world.cluster.calls if call.startswith("patch Pod")]


def test_the_rollouts_with_the_fewest_samples_in_flight_leave():
    world = running()
    pods = rollouts(world)
    world.busy_workers = {f"{pod}-1-a1b2c3": busy for pod, busy in zip(pods, (3, 0, 7, 5), strict=True)}
    scale(world, 2)
    assert rollouts(world) == [pods[2], pods[3]]
    calls = world.cluster.calls
    assert len(written_costs(world)) == 4
    assert max(calls.index(call) for call in written_costs(world)) < calls.index("scale Deployment job-rollout 2")


def test_costs_of_an_earlier_scaling_do_not_count():
    world = running()
    pods = rollouts(world)
    world.busy_workers = {f"{pod}-1-a1b2c3": busy for pod, busy in zip(pods, (9, 0, 8, 7), strict=True)}
    scale(world, 3)
    world.busy_workers = {f"{pod}-1-a1b2c3": busy for pod, busy in zip(pods, (0, 0, 1, 2), strict=True)}
    scale(world, 2)
    assert rollouts(world) == [pods[2], pods[3]]


def test_a_worker_without_a_heartbeat_has_nothing_to_lose():
    world = running()
    pods = rollouts(world)
    world.busy_workers = {f"{pod}-1-a1b2c3": 4 for pod in pods[1:]}
    scale(world, 3)
    assert rollouts(world) == pods[1:]


@pytest.mark.parametrize("replicas", [4, 6, 0])
def test_nothing_is_written_at_rest_and_when_no_rollout_is_chosen(replicas: int):
    world = running(rollout={"groups": [{"name": "base", "replicas": 4}, {"name": "spot", "replicas": 1}]})
    world.busy_workers = {f"{pod}-1-a1b2c3": 4 for pod in rollouts(world)}
    world.cluster.calls.clear()
    world.cluster.edit("RLJob", "job", lambda job: job["spec"]["rollout"]["groups"][0].update(replicas=replicas))
    world.settle()
    assert len(rollouts(world)) == replicas + 1
    assert not written_costs(world)
    assert not any(names.DELETION_COST in annotations_of(pod) for pod in world.cluster.of_kind("Pod"))


def test_each_group_is_chosen_from_by_itself():
    groups = [{"name": "base", "replicas": 2}, {"name": "spot", "replicas": 3}]
    world = running(rollout={"groups": groups})
    pods = rollouts(world)
    spot = [pod for pod in pods if "-spot-" in pod]
    world.busy_workers = {f"{pod}-1-a1b2c3": 0 for pod in pods} | {f"{spot[0]}-1-a1b2c3": 6, f"{spot[2]}-1-a1b2c3": 5}
    world.cluster.calls.clear()
    world.cluster.edit("RLJob", "job", lambda job: job["spec"]["rollout"]["groups"][1].update(replicas=2))
    world.settle()
    assert [pod for pod in rollouts(world) if "-spot-" in pod] == [spot[0], spot[2]]
    assert {call.split()[2] for call in written_costs(world)} == set(spot)


def test_without_a_metrics_service_the_replica_set_chooses():
    world = running()
    scale(world, 2)
    assert len(rollouts(world)) == 2
    assert not written_costs(world)


@pytest.mark.parametrize("status", [403, 404, 500])
def test_a_cost_that_cannot_be_written_does_not_hold_up_the_scaling(status: int):
    world = running()
    world.busy_workers = {f"{pod}-1-a1b2c3": 4 for pod in rollouts(world)}

    def refuse(call: str) -> None:
        if call.startswith("patch Pod"):
            raise error_of(status, "no")

    world.cluster.before = refuse
    scale(world, 2)
    assert len(rollouts(world)) == 2
