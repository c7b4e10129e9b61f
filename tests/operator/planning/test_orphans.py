"""What is deleted in parts or held up: a job with ``--cascade=orphan``, pods without their Job, foreign finalizers."""

from __future__ import annotations

from typing import Any

import pytest
from world import SPANS_PODS, World, rljob, settled

from plaudit_operator import names
from plaudit_operator.cache import Key
from plaudit_operator.names import ConditionType
from plaudit_operator.observed import labels, owner_uid, timestamp
from plaudit_operator.runtime.kube import ApiUnavailableError

TRAINER = {"name": "job-trainer-0", "kind": "Job"}


def orphan(world: World) -> None:
    """Delete the object and leave what it owned; the operator looks."""
    world.cluster.orphan(world.key.kind, "job")
    world.learn()


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
    world.learn(4)
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


@pytest.mark.parametrize("owners", [[], [{"apiVersion": "v1", "kind": "ConfigMap", "name": "other", "uid": "other"}]])
def test_an_object_whose_owner_was_taken_away_is_adopted_again(owners: list[dict[str, Any]]):
    world = settled()
    world.cluster.edit("Deployment", "job-reward", lambda item: item["metadata"].update(ownerReferences=owners))
    before = pods(world)
    world.settle()
    found = world.cluster.find("Deployment", "job-reward")
    assert found
    assert owner_uid(found) == world.job["metadata"]["uid"]
    assert pods(world) == before


def left_by_their_job(world: World, job: str) -> list[dict[str, Any]]:
    """A Job is deleted, and its pods stay (``kubectl delete job --cascade=orphan``)."""
    uid = (world.cluster.find("Job", job) or {})["metadata"]["uid"]
    left = [pod["metadata"]["name"] for pod in world.cluster.of_kind("Pod") if owner_uid(pod) == uid]
    world.cluster.orphan("Job", job)
    return [pod for name in left if (pod := world.cluster.find("Pod", name))]


@pytest.mark.parametrize("phase", ["Running", "Succeeded"])
@pytest.mark.parametrize(("job", "spec"), [("job-trainer-0", {}), ("job-rollout-1-0", {"rollout": SPANS_PODS})])
def test_pods_that_their_job_left_make_room_for_another(job: str, spec: dict[str, Any], phase: str):
    world = settled(**spec)
    for pod in left_by_their_job(world, job):
        world.cluster.put({**pod, "status": {**pod["status"], "phase": phase}})
    world.settle()
    assert (world.status["phase"], world.status["restarts"]) == ("Running", 0)
    assert world.cluster.find("Job", job)
    assert not [pod for pod in world.cluster.of_kind("Pod") if not owner_uid(pod)]


@pytest.mark.parametrize("heard", [True, False])
def test_an_object_whose_labels_were_taken_away_gets_them_back(heard: bool):
    world = settled()
    before = pods(world)
    label = names.LABEL_JOB if heard else names.MANAGED_BY
    taken = [(kind, name, label) for kind, name in [("Deployment", "job-reward"), ("Job", "job-trainer-0")]]
    for kind, name, _ in taken:
        world.cluster.edit(kind, name, lambda item: item["metadata"]["labels"].pop(label))
    if not heard:
        world.relist()  # to a watch with a selector it is gone
    world.settle()
    for kind, name, label in taken:
        assert label in labels(world.cluster.find(kind, name) or {})
    assert pods(world) == before
    assert world.status["phase"] == "Running"


def test_labels_that_a_policy_takes_away_each_time_are_reported():
    world = settled()
    patch = world.cluster.patch

    def strip(*_: Any) -> None:
        world.cluster.edit("Deployment", "job-reward", lambda item: item["metadata"]["labels"].pop(names.MANAGED_BY, 0))

    world.cluster.patch = lambda *given: (patch(*given), strip())[0]  # type: ignore[method-assign, func-returns-value]
    strip()
    world.relist()
    world.reconcile()
    admitted = world.condition(ConditionType.ADMITTED)
    assert (admitted["status"], admitted["reason"]) == ("False", "RefusedByCluster")
    assert "Deployment job-reward: an admission webhook or policy takes away its labels" in admitted["message"]


HOLD = "example.com/hold"


def held(world: World, kind: str, name: str) -> None:
    """An object is deleted, for whose end somebody's finalizer waits."""

    def leaves(item: dict[str, Any]) -> None:
        item["metadata"] |= {"deletionTimestamp": timestamp(world.cluster.now), "finalizers": [HOLD]}

    world.cluster.edit(kind, name, leaves)


def test_a_job_that_waits_for_a_finalizer_says_that_its_objects_stay_and_follows_them():
    world = settled()
    before = pods(world)
    held(world, "RLJob", "job")
    world.settle()
    ready = world.condition("Ready")
    assert (world.status["phase"], ready["status"], ready["reason"]) == ("Deleting", "False", "Deleting")
    assert ready["message"].startswith(f"it is being deleted and waits for its finalizer {HOLD}")
    assert world.condition("TrainerRunning")["status"] == "True"
    assert pods(world) == before
    writes = world.cluster.writes
    world.settle()
    assert world.cluster.writes == writes
    world.cluster.remove("Deployment", "job-reward")
    world.settle()
    assert not world.cluster.find("Deployment", "job-reward")
    assert world.condition("RewardReady")["status"] == "False"
    world.cluster.end_trainer(0)
    world.settle()
    assert world.status["phase"] == "Complete"
    assert {kind for kind, _ in world.children()} == {"Secret"}


def test_a_job_that_is_deleted_in_the_foreground_names_the_finalizer_that_holds_a_child():
    world = settled()
    world.cluster.delete_in_foreground("RLJob", "job")
    held(world, "Deployment", "job-reward")
    world.settle()
    assert world.status["phase"] == "Deleting"
    assert f"Deployment job-reward waits for its finalizer {HOLD}" in world.condition("Ready")["message"]


def test_a_pod_that_a_finalizer_keeps_from_the_next_attempt_is_named():
    world = settled()
    (pod,) = [pod for pod in world.cluster.of_kind("Pod") if labels(pod)[names.LABEL_ROLE] == "trainer"]
    world.cluster.end_trainer(1)
    held(world, "Pod", pod["metadata"]["name"])
    world.cluster.run_controllers()
    world.cluster.delete = lambda *_: None  # type: ignore[method-assign]
    world.learn(3)
    told = f"Pod {pod['metadata']['name']} waits for its finalizer {HOLD}, which has to be taken off"
    assert told in world.condition("TrainerRunning")["message"]


def test_a_child_that_waits_for_a_finalizer_is_reported_until_it_is_made_again():
    world = settled()
    held(world, "Deployment", "job-reward")
    world.settle()
    admitted = world.condition(ConditionType.ADMITTED)
    assert (admitted["status"], admitted["reason"]) == ("False", "AwaitingDeletion")
    told = f"Deployment job-reward: waits for its finalizer {HOLD}. Whoever set the finalizer has to take it off"
    assert admitted["message"].startswith(told)
    world.cluster.remove("Deployment", "job-reward")
    world.settle()
    assert world.status["phase"] == "Running"


def test_the_next_job_of_a_name_is_told_which_finalizer_holds_what_the_last_one_had():
    world = settled()
    held(world, "Service", "job-redis")
    left = world.cluster.find("Service", "job-redis") or {}
    world.cluster.remove("RLJob", "job")
    world.cluster.put(left)
    world.cluster.put(rljob())
    world.learn(2)
    admitted = world.condition(ConditionType.ADMITTED)
    assert admitted["reason"] == "AwaitingDeletion"
    assert f"It waits for its finalizer {HOLD}. Whoever set the finalizer" in admitted["message"]


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
