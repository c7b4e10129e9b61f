"""``lifecycle.failurePolicy.rules``: what follows the end of an attempt, by exit code or reason."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from test_backoff import reject
from world import World, settled

from plaudit_operator.names import ConditionType


def running(*rules: dict[str, Any], **policy: Any) -> World:
    return settled(lifecycle={"failurePolicy": {"rules": list(rules), **policy}})


def codes(*values: int, operator: str = "In") -> dict[str, Any]:
    return {"onExitCodes": {"operator": operator, "values": list(values)}}


@pytest.mark.parametrize(
    ("rule", "code", "phase", "counted"),
    [
        ({"action": "Fail", **codes(7, 8)}, 7, "Failed", (0, 0)),
        ({"action": "Fail", **codes(7, 8)}, 9, "Running", (1, 0)),
        ({"action": "Ignore", **codes(139)}, 139, "Running", (0, 1)),
        ({"action": "Fail", **codes(139, operator="NotIn")}, 1, "Failed", (0, 0)),
        ({"action": "Fail", **codes(139, operator="NotIn")}, 139, "Running", (1, 0)),
        ({"action": "Count", **codes(42)}, 42, "Running", (1, 0)),  # comes before the meaning of 42
        ({"action": "Fail", "onReasons": ["Error"]}, 1, "Failed", (0, 0)),
        ({"action": "Fail", "onReasons": ["OOMKilled"]}, 1, "Running", (1, 0)),
    ],
)
def test_a_rule_decides_the_action(rule: dict[str, Any], code: int, phase: str, counted: tuple[int, int]):
    world = running(rule)
    world.cluster.end_trainer(code, "boom")
    world.settle()
    assert world.status["phase"] == phase
    assert (world.status["restarts"], world.status["disruptions"]) == counted


def test_a_pod_that_its_kubelet_rejects_can_fail_the_job_at_once():
    world = running({"action": "Fail", "onReasons": ["TopologyAffinityError"]})
    reject(world)
    world.settle()
    failed, stalled = world.condition(ConditionType.FAILED), world.condition(ConditionType.STALLED)
    assert (failed["status"], failed["reason"]) == ("True", "FailureRule")
    assert "rules[0]: Fail on reason TopologyAffinityError" in failed["message"]
    assert (stalled["status"], stalled["reason"]) == ("True", "FailureRule")


def test_the_first_rule_that_applies_wins():
    world = running({"action": "Ignore", **codes(1)}, {"action": "Fail", **codes(1)})
    world.cluster.end_trainer(1)
    world.settle()
    assert (world.status["phase"], world.status["disruptions"]) == ("Running", 1)


def test_ignored_ends_have_a_limit():
    world = running({"action": "Ignore", **codes(1)}, maxDisruptions=1)
    for _ in range(2):
        world.cluster.end_trainer(1)
        world.settle()
    assert world.condition(ConditionType.FAILED)["reason"] == "TooManyDisruptions"


def test_pauses_follow_the_jobs_policy():
    world = running(backoff={"initialSeconds": 2, "maxSeconds": 3, "resetAfterSeconds": 1000}, maxDisruptions=10)
    world.closed_step = 0
    starts = []
    for _ in range(5):
        starts.append(world.cluster.now)
        reject(world)
        world.settle()
    assert [b - a for a, b in pairwise(starts)] == [0, 0, 2, 3]  # the first attempt had closed a step
