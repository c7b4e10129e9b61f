"""GPUs: the real scheduler places pods by ``nvidia.com/gpu``. No engine starts: the pods' image cannot be had."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import training
from real_cluster import Cluster

pytestmark = pytest.mark.timeout(600)

GPU = "nvidia.com/gpu"


def job(name: str, rollouts: int, gpus: int) -> dict[str, Any]:
    """A job whose trainer asks for one GPU and whose rollouts for so many each."""
    found = training.copy_digits(1, name)
    spec, nowhere = found["spec"], {"image": "localhost/none:1"}
    spec["rollout"] |= {"replicas": rollouts, "pod": nowhere}
    spec["rollout"]["engine"]["tensorParallelSize"] = gpus
    spec["trainer"]["pod"] = nowhere
    return found


def placed(cluster: Cluster, name: str) -> list[tuple[str, int]]:
    """Node and GPUs of every pod of a job that has both."""
    found = []
    for pod in cluster.get("pod", namespace=training.NAMESPACE).get("items", []):
        gpus = sum(int(c.get("resources", {}).get("limits", {}).get(GPU, 0)) for c in pod["spec"]["containers"])
        if gpus and pod["metadata"]["labels"]["plaudit.dev/job"] == name and "nodeName" in pod["spec"]:
            found.append((pod["spec"]["nodeName"], gpus))
    return found


def rollout_ready(cluster: Cluster, name: str) -> dict[str, Any]:
    """The condition of the rollouts."""
    return cluster.condition("rlj", name, training.NAMESPACE, "RolloutReady")


def test_pods_go_where_gpus_are_and_wait_where_there_are_none(shared: Cluster):
    if not shared.own:
        pytest.skip("counts on two nodes with four GPUs each")
    delete = partial(shared.kubectl, "--namespace", training.NAMESPACE, "delete", "rlj", "--wait=false")
    assert shared.apply(job("small", rollouts=5, gpus=1)).returncode == 0
    small = shared.until("six GPUs given", lambda: len(found := placed(shared, "small")) == 6 and found)
    assert all(sum(gpus for node, gpus in small if node == name) <= 4 for name in ("node1", "node2"))

    assert shared.apply(job("large", rollouts=1, gpus=4)).returncode == 0
    shared.until("unschedulable", lambda: rollout_ready(shared, "large").get("reason") == "Unschedulable")
    assert GPU in rollout_ready(shared, "large")["message"]
    assert [gpus for _, gpus in placed(shared, "large")] == [1]  # the trainer's

    delete("small")
    shared.until("room", lambda: sorted(gpus for _, gpus in placed(shared, "large")) == [1, 4])
    delete("large")
