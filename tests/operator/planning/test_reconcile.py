"""Pods that the API server refuses, and pods of jobs that were deleted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from cluster_model import ClusterModel
from world import World, rljob, settled

from plaudit_operator.cache import Key
from plaudit_operator.names import ConditionType
from plaudit_operator.observed import timestamp
from plaudit_operator.runtime.kinds import Kind
from plaudit_operator.runtime.kube import ApiUnavailableError


class Quota(ClusterModel):
    """A cluster whose quota refuses the pods of some kinds; their controllers emit events, as real ones do."""

    refused: tuple[str, ...] = ("Job", "StatefulSet")

    def _run_pods(self, owner: dict[str, Any], count: int) -> int:
        if owner["kind"] not in self.refused:
            return super()._run_pods(owner, count)
        self._refuse(owner)
        return 0

    def _run_job(self, job: dict[str, Any]) -> None:
        if "Job" in self.refused:
            self._refuse(job)
        else:
            super()._run_job(job)

    def _refuse(self, owner: dict[str, Any]) -> None:
        metadata = owner["metadata"]
        forbidden = f'pods "{metadata["name"]}-x7k2p" is forbidden: exceeded quota: team, requested: pods=1'
        name = f"{metadata['name']}.event"
        if self.find("Event", name) is None:
            event = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": name, "namespace": "default"}}
            event |= {"involvedObject": {"uid": metadata["uid"]}, "reason": "FailedCreate", "type": "Warning"}
            self.put(event | {"message": f"Error creating: {forbidden}", "lastTimestamp": timestamp(self.now)})


def test_a_quota_that_refuses_trainer_and_redis_is_reported_with_its_message():
    cluster = Quota()
    cluster.put(rljob())
    world = World(cluster=cluster)
    world.settle()
    cluster.now += 15
    world.settle()
    for kind, role in ((ConditionType.TRAINER_RUNNING, "trainer"), (ConditionType.TRANSPORT_READY, "transport")):
        condition = world.condition(kind)
        assert (condition["status"], condition["reason"]) == ("False", "RefusedByCluster")
        assert condition["message"].startswith(
            f"{role} 0/1: exceeded quota: team, requested: pods=1. Raise the namespace"
        )
    warned = [event["message"] for event in cluster.of_kind("Event") if event["reason"] == "RefusedByCluster"]
    assert len(warned) == 2
    cluster.calls.clear()
    cluster.now += 15
    world.reconcile()
    assert cluster.calls == []
    cluster.refused = ()
    world.settle()
    assert world.status["phase"] == "Running"


def test_a_job_whose_pods_never_come_is_looked_at_less_and_less_often():
    cluster = Quota()
    cluster.put(rljob())
    world = World(cluster=cluster)
    world.settle()
    looks, end = 0, cluster.now + 1200
    while cluster.now < end:
        result = world.learn()
        assert result is not None
        assert result.again_after_s is not None
        cluster.now += result.again_after_s
        looks += 1
    assert looks <= 10
    cluster.refused = ()
    world.settle()
    assert world.status["phase"] == "Running"


def test_jobs_of_a_namespace_share_one_list_of_its_events():
    class CountsLists(Quota):
        lists = 0

        def list(self, kind: Kind, namespace: str, selector: str, fields: str = "") -> Any:
            self.lists += kind.kind == "Event"
            return super().list(kind, namespace, selector, fields)

    cluster = CountsLists()
    for number in range(20):
        job = rljob()
        job["metadata"]["name"] = f"job-{number}"
        cluster.put(job)
    world = World(cluster=cluster)
    keys = [Key("default", f"job-{number}") for number in range(20)]

    def every_job_looks() -> None:
        for key in keys:
            world.reconciler.reconcile(key)
            world.deliver()

    every_job_looks()
    cluster.run_controllers()
    world.deliver()
    cluster.now += 15
    every_job_looks()
    assert cluster.lists == 1
    for key in keys:
        status = cluster.find("RLJob", key.name)["status"]
        (condition,) = (c for c in status["conditions"] if c["type"] == ConditionType.TRAINER_RUNNING)
        assert condition["message"].startswith("trainer 0/1: exceeded quota: team, requested: pods=1")


def leaving(grace_s: int) -> World:
    """Return a running job whose trainer's pod is being deleted with this grace period."""
    world = settled()
    (pod,) = (p for p in world.cluster.of_kind("Pod") if p["metadata"]["labels"]["plaudit.dev/role"] == "trainer")
    gone = copy.deepcopy(pod)
    gone["metadata"] |= {"deletionTimestamp": timestamp(world.cluster.now + grace_s)}
    gone["metadata"] |= {"deletionGracePeriodSeconds": grace_s}
    world.cluster.put(gone)
    world.cluster.calls.clear()
    return world


def delete_job(world: World) -> None:
    """Delete the RLJob before garbage collection deletes what it owns."""
    key = ("RLJob", "default", "job")
    world.cluster.events["RLJob"].append(("DELETED", world.cluster.objects.pop(key)))
    world.learn()


def test_the_trainer_of_a_deleted_job_does_not_hold_its_gpus_for_ten_minutes():
    world = leaving(600)
    delete_job(world)
    (call,) = world.cluster.calls
    assert call.startswith("delete Pod job-trainer-0")


def test_the_trainer_of_a_deleted_job_is_ended_although_another_job_has_its_name():
    world = leaving(600)
    another = rljob()
    another["metadata"]["uid"] = "feedface"
    world.cluster.objects.pop(("RLJob", "default", "job"))
    world.cluster.put(another)
    world.learn()
    assert sum(call.startswith("delete Pod job-trainer-0") for call in world.cluster.calls) == 1


def test_a_trainer_that_ends_soon_anyway_is_left_alone():
    world = leaving(30)
    delete_job(world)
    assert world.cluster.calls == []


def test_a_job_that_is_deleted_in_the_foreground_does_not_hold_its_gpus_for_ten_minutes_either():
    world = leaving(600)
    job = copy.deepcopy(world.job)
    job["metadata"] |= {"deletionTimestamp": timestamp(world.cluster.now), "finalizers": ["foregroundDeletion"]}
    world.cluster.put(job)
    world.learn()
    hurried, told = world.cluster.calls
    assert hurried.startswith("delete Pod job-trainer-0")
    assert told == "patch RLJob job status"
    assert (world.status["phase"], world.condition("Ready")["reason"]) == ("Deleting", "Deleting")
    assert {(role["desired"], role["ready"]) for role in world.status["roles"]} == {(0, 0)}
    world.deliver()
    writes = world.cluster.writes
    world.reconcile()
    assert world.cluster.writes == writes


WEBHOOK = "Internal error occurred: failed calling webhook validate.kyverno.svc-fail: connection refused"


@pytest.mark.parametrize(
    ("failing", "job", "named"),
    [
        ("create Deployment job-reward", {}, "Deployment job-reward"),
        ("create ConfigMap job-job", {}, "ConfigMap job-job"),
        ("create Secret", {}, "Secret job-redis-"),
        ("create Job", {}, "Job job-trainer-0"),
        ("get ConfigMap code", {"files": {"configMap": "code"}}, "API server"),
    ],
)
def test_a_call_that_fails_is_in_the_condition_after_one_look_and_soon_all_is_well(
    failing: str, job: dict[str, Any], named: str
):
    world = World(rljob(**job))
    code = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "code", "namespace": "default"}}
    world.cluster.put({**code, "data": {"reward.py": "def compute_score(*_): ...\n"}})

    def fail(call: str) -> None:
        if call.startswith(failing):
            raise ApiUnavailableError(WEBHOOK, 500)

    world.cluster.before = fail
    assert world.learn() is None
    admitted = world.condition(ConditionType.ADMITTED)
    assert (admitted["status"], admitted["reason"]) == ("False", "CallFailed")
    assert f"{named}" in admitted["message"]
    assert WEBHOOK in admitted["message"]
    assert world.status["phase"] == "Pending"
    world.cluster.before = lambda call: None
    world.settle()
    assert world.condition(ConditionType.ADMITTED)["status"] == "True"
    assert world.status["phase"] == "Running"


def test_a_deletion_that_fails_at_the_end_is_reported():
    world = settled()

    def fail(call: str) -> None:
        if call == "delete Deployment job-reward":
            raise ApiUnavailableError(WEBHOOK, 500)

    world.cluster.before = fail
    world.cluster.end_trainer(0)
    world.cluster.run_controllers()
    world.learn(3)
    admitted = world.condition(ConditionType.ADMITTED)
    assert admitted["message"].startswith(f"Deployment job-reward: {WEBHOOK}")
    assert world.status["phase"] == "Complete"
    world.cluster.before = lambda call: None
    world.settle()
    assert world.condition(ConditionType.ADMITTED)["message"] == "the job has ended"
    assert {kind for kind, _ in world.children()} == {"Secret"}


class Mirrored(ClusterModel):
    """A cluster whose webhook rewrites the images of all pod templates, as policies for mirrors do."""

    def _store(self, event: str, item: dict[str, Any]) -> dict[str, Any]:
        before = self.find(item["kind"], item["metadata"]["name"])
        if item["kind"] in ("Deployment", "StatefulSet"):
            item = copy.deepcopy(item)
            for container in item["spec"]["template"]["spec"]["containers"]:
                container["image"] = f"mirror/{container['image'].removeprefix('mirror/')}"
            if before is not None and before["spec"] != item["spec"]:
                item["metadata"]["generation"] += 1
        return super()._store(event, item)


def test_what_a_webhook_changes_each_time_is_not_written_again_and_again_but_edits_are_put_right():
    cluster = Mirrored()
    cluster.put(rljob())
    world = World(cluster=cluster)
    world.settle()
    assert world.status["phase"] == "Running"

    def applies(seconds: float = 10.0) -> list[str]:
        before = len(cluster.calls)
        cluster.now += seconds
        world.settle()
        return [call for call in cluster.calls[before:] if call.startswith("apply")]

    assert applies() == []
    cluster.edit("Deployment", "job-rollout", lambda item: item["metadata"]["labels"].pop("plaudit.dev/role"))
    cluster.edit("Deployment", "job-reward", lambda item: item["spec"].update(strategy={"type": "Recreate"}))
    assert set(applies()) == {"apply Deployment job-rollout", "apply Deployment job-reward"}
    assert applies() == []
    assert "apply Deployment job-metrics" in applies(600.0), "the policy may be gone"
    assert applies() == []
