"""Rollouts that leave a job: those with the least work in flight."""

from __future__ import annotations

from typing import Any

import pytest
from world import World, settled

from plaudit_operator import names
from plaudit_operator.observed import annotations_of, labels
from plaudit_operator.runtime.kube import error_of


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
