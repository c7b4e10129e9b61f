"""``kubectl scale rlj``: what the scale subresource reads and changes."""

from __future__ import annotations

from typing import Any

import pytest
from world import settled

from plaudit_operator.crd import custom_resource_definition


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
