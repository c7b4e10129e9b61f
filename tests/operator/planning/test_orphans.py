"""A job deleted with ``--cascade=orphan`` and created again takes over what is left, or says why it does not."""

from __future__ import annotations

from typing import Any

import pytest
from world import World, rljob, settled

from plaudit_operator import names
from plaudit_operator.cache import Key
from plaudit_operator.names import ConditionType
from plaudit_operator.observed import labels, owner_uid
from plaudit_operator.runtime.kube import ApiUnavailableError

TRAINER = {"name": "job-trainer-0", "kind": "Job"}


def orphan(world: World) -> None:
    """Delete the object and leave what it owned; the operator looks."""
    world.cluster.orphan(world.key.kind, "job")
    world.deliver()
    world.reconcile()


def pods(world: World) -> dict[str, str]:
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in world.cluster.of_kind("Pod")}


def test_the_new_job_takes_over_the_run_and_no_process_notices():
    world = settled()
    before, run = pods(world), world.status["run"]
    orphan(world)
    world.cluster.put(rljob())
    world.settle()
    assert pods(world) == before
    assert (world.status["phase"], world.status["run"]) == ("Running", run)
    uid = world.job["metadata"]["uid"]
    owners = {key: owner_uid(world.cluster.objects[key[0], "default", key[1]]) for key in world.children()}
    assert {kind for (kind, _), owner in owners.items() if owner != uid} == {"Secret"}
    writes = world.cluster.writes
    world.settle()
    assert world.cluster.writes == writes
    world.cluster.end_trainer(1)
    world.settle()
    assert (world.status["restarts"], world.status["phase"]) == (1, "Running")
    world.cluster.end_trainer(0)
    world.settle()
    assert world.status["phase"] == "Complete"
    assert {kind for kind, _ in world.children()} == {"Secret"}


def test_an_adoption_that_fails_half_way_is_reported_and_goes_on():
    world = settled()
    orphan(world)
    before = pods(world)
    world.cluster.put(rljob())

    def refuse(call: str) -> None:
        if call.startswith(("patch ConfigMap", "patch Job")):
            raise ApiUnavailableError("failed calling webhook", 500)

    world.cluster.before = refuse
    for _ in range(4):
        world.deliver()
        world.reconcile()
    admitted = world.condition(ConditionType.ADMITTED)
    assert (admitted["status"], admitted["reason"]) == ("False", "CallFailed")
    assert "Job job-trainer-0: failed calling webhook" in admitted["message"]
    world.cluster.before = lambda call: None
    world.settle()
    assert pods(world) == before
    assert world.status["phase"] == "Running"


def other_steps(job: dict[str, Any]) -> None:
    job["spec"]["algorithm"]["steps"] = 9


def other_model(job: dict[str, Any]) -> None:
    job["spec"]["model"]["source"] = "/plaudit/other"


def other_kind(job: dict[str, Any]) -> None:
    scorer = {"name": "right", "kind": "rule", "rule": "gsm8k"}
    job |= {"kind": "RewardService", "spec": {"reward": {"scorers": [scorer]}}}


@pytest.mark.parametrize("change", [other_model, other_kind])
def test_another_spec_adopts_nothing_and_the_condition_has_the_command_that_helps(change: Any):
    world = settled()
    orphan(world)
    job = rljob()
    change(job)
    world.cluster.put(job)
    world.key = Key("default", "job", job["kind"])
    world.settle()
    admitted = world.condition(ConditionType.ADMITTED)
    assert (admitted["status"], admitted["reason"]) == ("False", "NameTaken")
    assert ("spec.model.source" in admitted["message"]) == (change is other_model)
    command = admitted["message"].partition("kubectl delete --namespace default ")[2]
    assert "job/job-trainer-0" in command
    assert world.condition(ConditionType.STALLED)["status"] == "True"
    for named in command.split():
        kind, name = named.split("/")
        (found,) = {k for k, _, _ in world.cluster.objects if k.lower() == kind}
        world.cluster.remove(found, name)
    world.settle()
    assert world.status["phase"] == "Running"
    assert {labels(pod)[names.LABEL_RUN] for pod in world.cluster.of_kind("Pod")} == {world.status["run"]}


def test_an_object_whose_owner_was_taken_away_is_adopted_again():
    world = settled()
    world.cluster.edit("Deployment", "job-reward", lambda item: item["metadata"].pop("ownerReferences"))
    before = pods(world)
    world.settle()
    found = world.cluster.find("Deployment", "job-reward")
    assert found
    assert owner_uid(found) == world.job["metadata"]["uid"]
    assert pods(world) == before


def test_a_service_keeps_its_tokens_and_the_jobs_that_use_them():
    rule = {"name": "right", "kind": "rule", "rule": "gsm8k"}
    service = {**rljob(), "kind": "RewardService", "spec": {"reward": {"scorers": [rule]}}}
    world = World(service, key=Key("default", "job", "RewardService"))
    world.settle()
    run = world.status["run"]
    orphan(world)
    world.cluster.put(service)
    world.settle()
    assert (world.status["run"], world.status["phase"]) == (run, "Running")
    user = rljob(reward={"scorers": [{"name": "far", "kind": "service", "service": {"name": "job"}}]})
    user["metadata"]["name"] = "user"
    world.cluster.put(user)
    of_user = World(cluster=world.cluster, key=Key("default", "user"))
    of_user.settle()
    reward = world.cluster.find("Deployment", "user-reward")
    assert reward
    secrets = {
        volume["secret"]["secretName"] for volume in reward["spec"]["template"]["spec"]["volumes"] if "secret" in volume
    }
    assert secrets == {name for kind, name in world.children() if kind == "Secret" and "job-gateway" in name}
