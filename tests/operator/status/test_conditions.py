"""The conditions for generic tools: Ready, Reconciling, Stalled; and Argo CD's health, which follows from them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import redis
from world import World, reject, rljob, settled, stuck

from plaudit_operator.names import ConditionType
from plaudit_workers.launch.redis import RedisServer

PAGE = Path(__file__).parents[3] / "docs" / "kubernetes" / "gitops.md"


def summary(world: World) -> tuple[str, str, str]:
    """Ready, Reconciling, Stalled."""
    kinds = (ConditionType.READY, ConditionType.RECONCILING, ConditionType.STALLED)
    ready, reconciling, stalled = (world.condition(kind)["status"] for kind in kinds)
    return ready, reconciling, stalled


def running() -> World:
    return settled()


def starting() -> World:
    world = World()
    world.learn()
    return world


def suspended() -> World:
    return settled(suspend=True)


def invalid() -> World:
    return settled(storage=None)


def edited_badly() -> World:
    world = running()
    world.cluster.edit("RLJob", "job", lambda job: job["spec"].update(lifecycle={"activeDeadlineSeconds": -1}))
    world.settle()
    return world


def complete() -> World:
    world = running()
    world.cluster.end_trainer(0)
    world.settle()
    return world


def failed() -> World:
    world = running()
    world.cluster.end_trainer(42, "no use")
    world.settle()
    return world


def backing_off() -> World:
    world = stuck(World())
    for _ in range(2):
        reject(world)
        world.settle(passing_pauses=False)
    return world


CASES = {
    starting: (("False", "True", "False"), "Progressing"),
    running: (("True", "False", "False"), "Healthy"),
    suspended: (("False", "False", "False"), "Suspended"),
    invalid: (("False", "False", "True"), "Degraded"),
    edited_badly: (("True", "False", "True"), "Degraded"),
    complete: (("True", "False", "False"), "Healthy"),
    failed: (("False", "False", "True"), "Degraded"),
    backing_off: (("False", "False", "True"), "Degraded"),
}


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_a_jobs_summary(make: Any):
    assert summary(make()) == CASES[make][0]


def test_a_rejected_trainer_ends_stalled_with_the_kubelets_reason():
    world = stuck(World(rljob(lifecycle={"failurePolicy": {"maxDisruptions": 2}})))
    for _ in range(3):
        reject(world)
        world.settle()
    stalled = world.condition(ConditionType.STALLED)
    assert (stalled["status"], stalled["reason"]) == ("True", "TooManyDisruptions")
    assert "TopologyAffinityError" in stalled["message"]
    assert world.condition(ConditionType.READY)["reason"] == "TooManyDisruptions"


def test_ready_gives_the_missing_part_as_its_reason():
    world = starting()
    ready, redis_ = world.condition(ConditionType.READY), world.condition(ConditionType.TRANSPORT_READY)
    assert redis_["status"] == "False"
    assert (ready["status"], ready["reason"], ready["message"]) == ("False", redis_["reason"], redis_["message"])


def test_the_health_check_for_argo_cd(redis_server: RedisServer):
    # Argo CD runs Lua 5.1, and so does Redis.
    found = re.search(r"^```lua\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found
    script = f"local obj = cjson.decode(ARGV[1])\nlocal function check()\n{found[1]}end\nreturn cjson.encode(check())"
    with redis.Redis.from_url(redis_server.url, password=redis_server.password) as client:
        for make, (_, status) in CASES.items():
            health = json.loads(client.eval(script, 0, json.dumps(make().job)))  # type: ignore[arg-type]
            assert health["status"] == status, make.__name__
            assert health["message"]
        new = {"metadata": {"generation": 1}}
        assert json.loads(client.eval(script, 0, json.dumps(new)))["status"] == "Progressing"  # type: ignore[arg-type]


def test_a_job_of_another_controller_is_left_alone():
    world = World(rljob(managedBy="kueue.x-k8s.io/multikueue"))
    writes = world.cluster.writes
    world.settle()
    assert world.cluster.writes == writes
    assert not world.children()
    assert "status" not in world.job


def test_a_job_that_names_this_operator_runs():
    world = settled(managedBy="plaudit.dev/rljob-operator")
    assert world.status["phase"] == "Running"
    config = world.cluster.find("ConfigMap", "job-job")
    assert config
    assert "managedBy" not in config["data"]["job.yaml"]
