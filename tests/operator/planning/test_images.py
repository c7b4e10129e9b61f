"""Images are kept as they were when a pod of a job ran, not before, and a service takes new ones with a revision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from cluster_model import ClusterModel
from world import World, rljob

from plaudit_operator import names
from plaudit_operator.cache import Key
from plaudit_operator.observed import labels

SPANS_PODS = {"replicas": 2, "podsPerReplica": 2, "engine": {"tensorParallelSize": 2}}
RULE = {"name": "right", "kind": "rule", "rule": "gsm8k"}


class Registry(ClusterModel):
    """A cluster that cannot pull some images: a pod waits for the first of its containers that needs one."""

    missing: tuple[str, ...] = ()

    def _start(self, pod: dict[str, Any]) -> bool:
        containers = [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
        lacking = [container["image"] for container in containers if container["image"] in self.missing]
        if not lacking:
            return super()._start(pod)
        waiting = {"reason": "ImagePullBackOff", "message": "not found"}
        state = {"name": pod["spec"]["containers"][0]["name"], "state": {"waiting": waiting}, "image": lacking[0]}
        bound = [{"type": "PodScheduled", "status": "True"}]
        self._set_status(pod, {"phase": "Pending", "conditions": bound, "containerStatuses": [state]})
        return False


def world_of(kind: str, *missing: str, **spec: Any) -> World:
    cluster = Registry()
    cluster.missing = missing
    job = {**rljob(**spec), "kind": kind}
    if kind == "RewardService":
        job["spec"] = {"reward": {"scorers": [RULE]}}
    cluster.put(job)
    world = World(cluster=cluster, key=Key("default", "job", kind))
    world.settle()
    return world


def upgrade(world: World, **images: str) -> None:
    """The chart is given other images, and its operator starts anew."""
    world.settings = replace(world.settings, images=replace(world.settings.images, **images))
    world.start_operator()
    world.settle()


def images(world: World) -> dict[str, set[str]]:
    """Return the images of the pods of each role."""
    found: dict[str, set[str]] = {}
    for pod in world.cluster.of_kind("Pod"):
        containers = [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
        found.setdefault(labels(pod)[names.LABEL_ROLE], set()).update(each["image"] for each in containers)
    return found


def pods(world: World, *roles: str) -> set[str]:
    return {pod["metadata"]["uid"] for pod in world.cluster.of_kind("Pod") if labels(pod)[names.LABEL_ROLE] in roles}


@pytest.mark.parametrize("rollout", [{"replicas": 2}, SPANS_PODS])
def test_a_mistyped_image_is_mended_for_a_job_that_was_applied_and_pods_that_run_stay(rollout: dict[str, Any]):
    world = world_of("RLJob", "gpu:1", rollout=rollout)
    assert world.condition("TrainerRunning")["reason"] == "ImagePullFailed"
    running = pods(world, "redis", "reward", "metrics")
    upgrade(world, gpu="gpu:right", worker="worker:2")
    assert world.status["phase"] == "Running"
    assert pods(world, "redis", "reward", "metrics") == running
    assert images(world)["trainer"] == images(world)["rollout"] == {"gpu:right"}
    assert images(world)["reward"] == {"worker:1"}
    assert (world.status["attempt"], world.status["restarts"]) == (0, 0)
    before = pods(world, "trainer", "rollout", "redis", "reward", "metrics")
    upgrade(world, gpu="gpu:3")
    assert pods(world, "trainer", "rollout", "redis", "reward", "metrics") == before


def test_a_job_of_which_nothing_ran_begins_anew_with_the_charts_values():
    world = world_of("RLJob", "worker:1", "redis:1", "gpu:1")
    world.settings = replace(world.settings, job_defaults='{"nodeSelector": {"disk": "ssd"}}')
    upgrade(world, worker="worker:2", redis="redis:2", gpu="gpu:2")
    assert world.status["phase"] == "Running"
    assert set.union(*images(world).values()) == {"worker:2", "redis:2", "gpu:2"}
    assert all(pod["spec"]["nodeSelector"] == {"disk": "ssd"} for pod in world.cluster.of_kind("Pod"))


def test_a_job_that_waits_for_gpus_does_not_mix_two_releases():
    world = world_of("RLJob")

    def unready(item: dict[str, Any]) -> None:
        item["status"].pop("startTime", None)

    world.cluster.edit("RLJob", "job", unready)
    before = pods(world, "trainer", "rollout", "redis", "reward", "metrics")
    upgrade(world, worker="worker:2", redis="redis:2", gpu="gpu:2")
    assert pods(world, "trainer", "rollout", "redis", "reward", "metrics") == before


def edit(world: World, change: Callable[[dict[str, Any]], Any]) -> None:
    world.cluster.edit("RewardService", "job", lambda item: change(item["spec"]))
    world.settle()


def test_a_service_takes_new_images_with_a_revision_in_all_its_pods():
    world = world_of("RewardService")
    before = images(world)
    upgrade(world, worker="worker:2", redis="redis:2")
    assert images(world) == before
    edit(world, lambda spec: spec["reward"].update(workers={"replicas": 2}))
    assert images(world) == before
    edit(world, lambda spec: spec["reward"]["scorers"][0].update(weight=2.0))
    assert images(world)["redis"] == {"worker:2", "redis:2"}
    assert images(world)["metrics"] == images(world)["reward"] == images(world)["gateway"] == {"worker:2"}
    redis = pods(world, "redis", "metrics")
    edit(world, lambda spec: spec["reward"]["scorers"][0].update(weight=3.0))
    assert pods(world, "redis", "metrics") == redis  # the same images


def test_a_mistyped_image_of_a_new_revision_is_mended_while_the_earlier_one_serves():
    world = world_of("RewardService", "worker:typo")
    old = images(world)
    upgrade(world, worker="worker:typo")
    edit(world, lambda spec: spec["reward"]["scorers"][0].update(weight=2.0))
    assert world.condition("RolledOut")["status"] == "False"
    assert "worker:1" in images(world)["reward"]
    upgrade(world, worker="worker:2")
    assert world.condition("RolledOut")["status"] == "True"
    assert images(world)["reward"] == images(world)["gateway"] == {"worker:2"}
    assert old["reward"] == {"worker:1"}
