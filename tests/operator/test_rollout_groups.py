"""Groups of rollouts on different machines: each has its own pods, all belong to one job."""

from __future__ import annotations

from typing import Any

import pytest
from world import World, rljob, settled

from plaudit_job.load import parse_job
from plaudit_job.problem import JobError
from plaudit_operator import names
from plaudit_operator.names import ConditionType

ROLLOUT = {
    "engine": {"tensorParallelSize": 4, "arguments": {"block_size": 16}},
    "pod": {"nodeSelector": {"pool": "gpu"}, "priorityClassName": "low"},
    "groups": [
        {"name": "base", "replicas": 2, "pod": {"priorityClassName": "high"}},
        {
            "name": "spot",
            "replicas": 1,
            "podsPerReplica": 2,
            "engine": {"tensorParallelSize": 2, "arguments": {"seed": 1}},
            "pod": {"nodeSelector": {"pool": "spot"}, "gpuResource": "amd.com/gpu"},
        },
    ],
}


def running(**spec: Any) -> World:
    return settled(**{"rollout": ROLLOUT, **spec})


def template_of(world: World, kind: str, name: str) -> dict[str, Any]:
    found = world.cluster.find(kind, name)
    assert found
    pod: dict[str, Any] = found["spec"]["template"]["spec"]
    return pod


def test_each_group_has_objects_of_its_own_with_the_fields_it_gives_and_inherits():
    world = running()
    base, spot = template_of(world, "Deployment", "job-r-base"), template_of(world, "Job", "job-r-spot-0-0")
    assert base["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert spot["containers"][0]["resources"]["limits"] == {"amd.com/gpu": 1}
    assert (base["nodeSelector"], base["priorityClassName"]) == ({"pool": "gpu"}, "high")
    assert (spot["nodeSelector"], spot["priorityClassName"]) == ({"pool": "spot"}, "low")
    values = {variable["name"]: variable.get("value") for variable in spot["containers"][0]["env"]}
    assert values["PLAUDIT_ROLLOUT_GROUP"] == "spot"
    deployment = world.cluster.find("Deployment", "job-r-base")
    assert deployment
    assert deployment["spec"]["selector"]["matchLabels"][names.LABEL_ROLLOUT_GROUP] == "base"
    assert not world.cluster.find("Deployment", "job-rollout")
    assert world.status["replicas"]["rollout"] == "4/4"
    gpus = {role["name"]: role["gpus"] for role in world.status["cost"]["roles"]}
    assert (gpus["rollout/base"], gpus["rollout/spot"]) == (8, 2)


def pods_of_base(world: World) -> set[str]:
    return {pod["metadata"]["uid"] for pod in world.cluster.of_kind("Pod") if "r-base" in pod["metadata"]["name"]}


def test_replicas_of_a_group_may_change_to_none_and_back_while_others_go_on():
    world = running()
    kept = pods_of_base(world)
    scale(world, "spot", 0)
    assert not world.cluster.find("Job", "job-r-spot-0-0")
    assert world.status["replicas"]["rollout"] == "2/2"
    scale(world, "spot", 2)
    assert world.status["replicas"]["rollout"] == "6/6"
    assert kept == {
        pod["metadata"]["uid"] for pod in world.cluster.of_kind("Pod") if "r-base" in pod["metadata"]["name"]
    }
    assert world.condition(ConditionType.SPEC_VALID)["status"] == "True"


def scale(world: World, group: str, replicas: int) -> None:
    def edit(job: dict[str, Any]) -> None:
        next(each for each in job["spec"]["rollout"]["groups"] if each["name"] == group)["replicas"] = replicas

    world.cluster.edit("RLJob", "job", edit)
    world.settle()


def test_a_gang_counts_all_groups_and_fixes_their_sizes():
    world = running(scheduling={"gang": "native"})
    (group,) = world.cluster.of_kind("PodGroup")
    assert group["spec"]["schedulingPolicy"]["gang"]["minCount"] == 6  # 2 + 1 × 2 rollouts, trainer, Redis
    scale(world, "spot", 3)
    assert world.condition(ConditionType.SPEC_VALID)["reason"] == "ImmutableFieldChanged"
    assert world.status["replicas"]["rollout"] == "4/4"


def test_any_other_change_of_a_group_is_rejected():
    world = running()

    def edit(job: dict[str, Any]) -> None:
        job["spec"]["rollout"]["groups"][0]["pod"] = {"priorityClassName": "higher"}

    world.cluster.edit("RLJob", "job", edit)
    world.settle()
    assert world.condition(ConditionType.SPEC_VALID)["reason"] == "ImmutableFieldChanged"
    assert template_of(world, "Deployment", "job-r-base")["priorityClassName"] == "high"


FOUR_GPUS = {"resources": {"limits": {"nvidia.com/gpu": 4}}}


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"replicas": 2, "groups": [{"name": "a"}]}, "spec.rollout.replicas: counts workers without groups"),
        ({"groups": [{"name": "a"}, {"name": "a"}]}, "spec.rollout.groups[1].name: 'a' is used twice"),
        ({"groups": [{"name": "a", "replicas": 0}]}, "spec.rollout.groups: have no replicas at all"),
        ({"podsPerReplica": 3, "engine": {"tensorParallelSize": 4}}, "3 pods cannot share 4 GPUs"),
        ({"groups": [{"name": "a", "podsPerReplica": 2}]}, "spec.rollout.groups[0].podsPerReplica: 2 pods cannot"),
        (
            {"podsPerReplica": 2, "engine": {"tensorParallelSize": 4}, "pod": FOUR_GPUS},
            "contradicts tensorParallelSize × pipelineParallelSize ÷ podsPerReplica 2",
        ),
    ],
)  # fmt: skip
def test_contradictions_are_named(rollout: dict[str, Any], message: str):
    with pytest.raises(JobError) as raised:
        parse_job(rljob(rollout=rollout))
    assert message in str(raised.value)
