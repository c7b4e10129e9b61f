"""GPU time of a job, by role, over attempts and restarts, without a write at rest; what its scale subresource reads."""

from __future__ import annotations

from typing import Any

import pytest
from world import World, rljob, settled

from plaudit_operator.crd import custom_resource_definition
from plaudit_operator.observed import gpu_seconds
from plaudit_operator.plugin import summary

MODEL = {"name": "helpful", "kind": "model", "model": {"source": "/plaudit/rm"}}


def running(**sections: Any) -> World:
    """A job with 8 GPUs for its trainer, 2 × 4 for its rollouts and one for a reward model."""
    scorers = [*rljob()["spec"]["reward"]["scorers"], MODEL]
    rollout = {"replicas": 2, "engine": {"tensorParallelSize": 4}}
    trainer = {"ranks": 8, "strategy": "fsdp2"}
    return settled(reward={"scorers": scorers}, rollout=rollout, trainer=trainer, **sections)


def spent(world: World) -> dict[str, int]:
    return gpu_seconds(world.status["cost"], world.cluster.now)


def look(world: World, after_s: float) -> None:
    """Time passes, and the operator looks at the job."""
    world.cluster.now += after_s
    world.settle()


def test_gpus_count_by_role_while_pods_hold_them():
    world = running()
    assert {role["name"]: role["gpus"] for role in world.status["cost"]["roles"]} == {
        "model/helpful": 1,
        "rollout": 8,
        "trainer": 8,
    }
    before = spent(world)
    look(world, 100)
    world.closed_step = 5
    look(world, 100)
    world.start_operator()
    look(world, 100)
    gained = {role: seconds - before[role] for role, seconds in spent(world).items()}
    assert gained == {"model/helpful": 300, "rollout": 2400, "trainer": 2400}


def test_a_job_at_rest_is_not_written_for_its_cost():
    world = running()
    look(world, 20)
    writes = world.cluster.writes
    look(world, 3600)
    assert world.cluster.writes == writes
    assert spent(world)["rollout"] >= 8 * 3600


def test_a_suspended_or_ended_job_costs_nothing_more():
    world = running()
    world.cluster.edit("RLJob", "job", lambda job: job["spec"].update(suspend=True))
    look(world, 10)
    before = spent(world)
    look(world, 1000)
    assert spent(world) == before
    world.cluster.edit("RLJob", "job", lambda job: job["spec"].update(suspend=False))
    look(world, 10)
    world.cluster.end_trainer(0)
    look(world, 10)
    before = spent(world)
    look(world, 1000)
    assert spent(world) == before
    assert before["trainer"] > 0


def test_waiting_for_rewards_costs_the_trainers_gpus():
    world = running()
    world.exposed_s = 2.5
    world.closed_step = 12  # ten more steps
    look(world, 100)
    assert world.status["cost"]["exposedRewardGpuSeconds"] == 10 * 2.5 * 8
    text = summary(world.job, [], world.cluster.now)
    assert "GPU-hours (model/helpful" in text
    assert "waiting for rewards cost 0.1 of them" in text


def test_a_job_without_gpus_has_no_cost():
    none = {"resources": {"limits": {"nvidia.com/gpu": 0}}}
    world = settled(rollout={"pod": none}, trainer={"pod": none})
    assert "cost" not in world.status


def scale_paths() -> dict[str, str]:
    paths: dict[str, str] = custom_resource_definition()["spec"]["versions"][0]["subresources"]["scale"]
    return paths


def at(job: dict[str, Any], path: str) -> Any:
    """Return the value of a path such as ``.spec.rollout.replicas``."""
    for name in path.strip(".").split("."):
        job = job[name]
    return job


@pytest.mark.parametrize("pods", [1, 2])
def test_a_scaled_job_reports_as_many_rollouts_as_were_asked_for(pods: int):
    engine = {"tensorParallelSize": 2}
    world = settled(rollout={"replicas": 2, "podsPerReplica": pods, "engine": engine})
    paths = scale_paths()
    assert (at(world.job, paths["specReplicasPath"]), at(world.job, paths["statusReplicasPath"])) == (2, 2)
    wanted = dict(pair.split("=") for pair in at(world.job, paths["labelSelectorPath"]).split(","))
    rank = wanted.pop("batch.kubernetes.io/job-completion-index", None)  # the Job controller sets it on pods
    assert rank == (None if pods == 1 else "0")
    labels = [pod["metadata"]["labels"] for pod in world.cluster.of_kind("Pod")]
    assert sum(wanted.items() <= each.items() for each in labels) == 2 * pods
    world.cluster.edit("RLJob", "job", lambda job: job["spec"]["rollout"].update(replicas=4))
    world.settle()
    assert at(world.job, paths["statusReplicasPath"]) == 4
    world.cluster.edit("RLJob", "job", lambda job: job["spec"]["rollout"].update(replicas=1))
    world.settle()
    assert at(world.job, paths["statusReplicasPath"]) == 1
    assert world.status["phase"] == "Running"
