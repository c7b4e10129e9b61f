"""Attempts of the trainer that end early, again and again."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
from world import World, rljob

from plaudit_job.spec.rljob import BackoffSpec
from plaudit_operator.attempts import pause_s
from plaudit_operator.names import ConditionType


def stuck(world: World) -> World:
    """A job whose attempts close no step."""
    world.closed_step = 0
    world.settle()
    return world


def reject(world: World) -> None:
    """The kubelet refuses the trainer's pods: they never run."""
    for pod in world.cluster.of_kind("Pod"):
        if pod["metadata"]["labels"]["plaudit.dev/role"] == "trainer":
            refused = copy.deepcopy(pod)
            refused["status"] = {
                "phase": "Failed",
                "reason": "TopologyAffinityError",
                "message": "Resources cannot be allocated with Topology locality",
            }
            world.cluster.put(refused)


def test_the_pause_doubles_up_to_five_minutes():
    assert [pause_s(count, BackoffSpec()) for count in range(9)] == [0, 0, 10, 20, 40, 80, 160, 300, 300]
    assert pause_s(1_000_000, BackoffSpec()) == 300


def test_a_trainer_that_its_kubelet_rejects_backs_off_and_fails_at_its_limit():
    world = stuck(World(rljob(lifecycle={"failurePolicy": {"maxDisruptions": 4}})))
    starts = []
    for _ in range(5):
        starts.append(world.cluster.now)
        reject(world)
        world.settle()
    assert [b - a for a, b in pairwise(starts)] == [0, 10, 20, 40]
    failed = world.condition(ConditionType.FAILED)
    assert failed["reason"] == "TooManyDisruptions"
    assert "TopologyAffinityError" in failed["message"]
    assert "maxDisruptions is 4" in failed["message"]


def test_while_it_waits_the_condition_names_the_last_failure_and_the_time_and_nothing_is_written():
    world = stuck(World())
    for _ in range(2):
        reject(world)
        world.settle(passing_pauses=False)
    running = world.condition(ConditionType.TRAINER_RUNNING)
    assert (running["status"], running["reason"]) == ("False", "BackOff")
    assert "TopologyAffinityError" in running["message"]
    assert world.status["nextAttemptTime"] in running["message"]
    assert not world.cluster.of_kind("Job")
    writes = world.cluster.writes
    world.settle(passing_pauses=False)
    assert world.cluster.writes == writes
    world.settle()
    assert world.status["phase"] == "Running"


def test_an_attempt_that_closed_a_step_is_followed_by_the_next_at_once():
    world = stuck(World())
    starts = []
    for step in (0, 0, 0, 3, 3):
        starts.append(world.cluster.now)
        world.closed_step = step
        world.cluster.now += 20  # progress is read every ten seconds
        world.settle()
        reject(world)
        world.settle()
    assert [b - a - 20 for a, b in pairwise(starts)] == [0, 10, 20, 0]


@pytest.mark.parametrize(("ran", "short"), [("00:09:59", 2), ("00:10:00", 0)])
def test_an_attempt_that_ran_for_ten_minutes_ends_the_back_off(ran: str, short: int):
    world = stuck(World())
    reject(world)
    world.settle()
    for pod in world.cluster.of_kind("Pod"):
        if pod["metadata"]["labels"]["plaudit.dev/role"] == "trainer":
            ended = copy.deepcopy(pod)
            times = {"startedAt": "2026-01-01T00:00:00Z", "finishedAt": f"2026-01-01T{ran}Z"}
            state = {"terminated": {"exitCode": 1, "message": "boom", **times}}
            containers = [{"name": "trainer", "state": state, "restartCount": 0}]
            ended["status"] = {"phase": "Failed", "containerStatuses": containers}
            world.cluster.put(ended)
    world.settle()
    assert world.status["shortAttempts"] == short
