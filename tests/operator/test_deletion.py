"""A deleted job: its trainer saves first, with a Redis, and then nothing is left."""

from __future__ import annotations

from typing import Any

from world import World, rljob, settled

from plaudit_operator.names import ConditionType


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
    world.deliver()
    world.reconcile()
    assert graces == [120]


def test_a_new_job_of_the_same_name_starts_once_the_old_one_is_gone():
    world = deleted_while_the_trainer_saves()
    old = trainer_of(world)["metadata"]["name"]
    world.cluster.put(rljob())
    for _ in range(5):
        world.deliver()
        world.reconcile()
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
