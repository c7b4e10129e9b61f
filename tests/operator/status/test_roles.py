"""What befalls a job's pods, on the model of a cluster: what is told of it, and what is done about a lost node."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from cluster_model import START
from world import World, settled

from plaudit_operator.names import ConditionType
from plaudit_operator.observed import timestamp
from plaudit_operator.runtime.kube import InvalidError
from plaudit_operator.status.progress import troubles


def change_pods(world: World, role: str, status: dict[str, Any], **metadata: Any) -> None:
    """The kubelet, or whoever stands in for it, says something of all pods of a role."""
    for pod in world.cluster.of_kind("Pod"):
        if pod["metadata"]["labels"]["plaudit.dev/role"] == role:
            changed = copy.deepcopy(pod)
            changed["metadata"] |= metadata
            changed["status"] |= status
            world.cluster.put(changed)


def lose_node_of(world: World, role: str, grace_s: int) -> None:
    """As node controller and taint manager leave a pod whose kubelet is silent (seen on Kubernetes 1.36)."""
    conditions = [
        {"type": "ContainersReady", "status": "True"},
        {"type": "Ready", "status": "False"},
        {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "DeletionByTaintManager",
            "lastTransitionTime": timestamp(world.cluster.now),
        },
    ]
    end = timestamp(world.cluster.now + grace_s)
    change_pods(world, role, {"conditions": conditions}, deletionTimestamp=end)


def turns(world: World, count: int = 4) -> None:
    """The operator works; no controller does."""
    for _ in range(count):
        world.learn()


def pods_of(world: World, role: str) -> list[dict[str, Any]]:
    return [pod for pod in world.cluster.of_kind("Pod") if pod["metadata"]["labels"]["plaudit.dev/role"] == role]


def test_a_trainer_on_a_lost_node_does_not_wait_for_its_ten_minutes_of_grace():
    world = settled()
    lose_node_of(world, "trainer", grace_s=600)
    turns(world)
    assert len(pods_of(world, "trainer")) == 1  # the node may come back
    world.cluster.now += 16
    turns(world)
    assert not pods_of(world, "trainer")
    world.settle()
    assert (world.status["disruptions"], world.status["restarts"], world.status["phase"]) == (1, 0, "Running")


def test_a_trainer_that_is_drained_keeps_its_grace():
    world = settled()
    drained = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    conditions = [{"type": "ContainersReady", "status": "True"}, {"type": "Ready", "status": "True"}, drained]
    change_pods(world, "trainer", {"conditions": conditions}, deletionTimestamp=timestamp(START + 600))
    world.cluster.now += 590
    turns(world)
    assert len(pods_of(world, "trainer")) == 1
    assert not any("delete Pod" in call for call in world.cluster.calls)


def test_redis_on_a_lost_node_is_reported_and_never_forced():
    world = settled()
    lose_node_of(world, "redis", grace_s=30)
    world.cluster.edit("StatefulSet", "job-redis", lambda item: item["status"].update(readyReplicas=0))
    world.cluster.now += 3600
    turns(world)
    assert len(pods_of(world, "redis")) == 1
    assert world.condition(ConditionType.DEGRADED)["reason"] == "NodeLost"
    assert world.status["phase"] == "Degraded"


def test_redis_that_a_taint_drives_from_a_node_that_runs_has_not_lost_it():
    world = settled()
    driven = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
    kinds = ("ContainersReady", "Ready")
    for ready in ("True", "False"):
        conditions = [driven, *({"type": kind, "status": ready} for kind in kinds)]
        change_pods(world, "redis", {"conditions": conditions}, deletionTimestamp=timestamp(START + 30))
        world.cluster.edit("StatefulSet", "job-redis", lambda item: item["status"].update(readyReplicas=0))
        turns(world)
        assert world.condition(ConditionType.DEGRADED)["reason"] == "Starting"


def test_redis_that_is_deleted_by_hand_has_not_lost_its_node():
    world = settled()
    change_pods(world, "redis", {}, deletionTimestamp=timestamp(START + 30))
    world.cluster.edit("StatefulSet", "job-redis", lambda item: item["status"].update(readyReplicas=0))
    turns(world)
    assert world.condition(ConditionType.DEGRADED)["reason"] == "Starting"


def test_pods_that_have_ended_are_not_ready_although_their_deployment_says_so_still():
    world = settled()
    for pod in pods_of(world, "rollout"):
        world.cluster.remove("Pod", pod["metadata"]["name"])
    turns(world)
    counted = world.cluster.find("Deployment", "job-rollout")
    assert counted is not None
    assert counted["status"]["readyReplicas"] == 2
    (rollout,) = (role for role in world.status["roles"] if role["name"] == "rollout")
    assert (rollout["ready"], world.status["replicas"]["rollout"]) == (0, "0/2")
    assert world.condition(ConditionType.ROLLOUT_READY)["status"] == "False"


WAITING = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}, "image": "gpu:1"}
KILLED = {"state": {}, "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes"}


def container(**status: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "c", "restartCount": 1, **status}], "conditions": []}


@pytest.mark.parametrize(
    ("role", "kind", "pods", "reason", "words"),
    [
        ("rollout", "RolloutReady", container(**WAITING), "ImagePullFailed", "spec.rollout.pod.image"),
        (
            "reward",
            "RewardReady",
            container(name="reward", **KILLED),
            "OutOfMemory",
            "spec.reward.workers.pod.resources.limits.memory",
        ),
        ("rollout", "RolloutReady", {"conditions": [UNSCHEDULABLE]}, "Unschedulable", "lower spec.rollout.pod"),
    ],
)
def test_trouble_is_reported_once_with_its_remedy(role: str, kind: str, pods: dict[str, Any], reason: str, words: str):
    world = settled()
    change_pods(world, role, pods)
    world.cluster.edit("Deployment", f"job-{role}", lambda item: item["status"].update(readyReplicas=0))
    turns(world, 8)
    assert world.condition(kind)["reason"] == reason
    assert words in world.condition(kind)["message"]
    told = [event for event in world.cluster.of_kind("Event") if event["reason"] == reason]
    assert [event["type"] for event in told] == ["Warning"]
    assert words in told[0]["message"]


def test_a_problem_reported_by_metrics_degrades_a_job_until_it_is_solved(monkeypatch: pytest.MonkeyPatch):
    found = troubles({"quality"}, 70, 100)
    monkeypatch.setattr(World, "read", lambda *_, **__: {"step": 1, "troubles": found})
    world = settled()
    world.cluster.now += 10
    world.settle()
    degraded = world.condition(ConditionType.DEGRADED)
    assert (world.status["phase"], degraded["reason"]) == ("Degraded", "JudgeFailing")
    assert "scorer 'quality'" in degraded["message"]
    assert "spec.transport.managed.memory" in degraded["message"]
    assert ("Warning", "JudgeFailing") in {(e["type"], e["reason"]) for e in world.cluster.of_kind("Event")}
    found = troubles(set(), 60, 100)
    world.cluster.now += 10
    world.settle()
    assert world.status["phase"] == "Running"


def test_a_redis_without_a_limit_is_never_full():
    assert troubles(set(), 7 << 30, 0) == []


def test_a_running_job_whose_lost_service_the_cluster_refuses_is_degraded_until_it_is_there_again():
    world = settled()

    def forbids(call: str) -> None:
        if call == "create Service job-metrics":
            raise InvalidError("services is forbidden", 403)

    world.cluster.before = forbids
    world.cluster.remove("Service", "job-metrics")
    turns(world)
    assert world.condition(ConditionType.ADMITTED)["status"] == "False"
    found = world.condition(ConditionType.DEGRADED)
    assert (found["status"], found["reason"]) == ("True", "RefusedByCluster")
    assert "Service job-metrics: services is forbidden" in found["message"]
    assert world.status["phase"] == "Degraded"
    world.cluster.before = lambda call: None
    world.settle()
    assert world.condition(ConditionType.DEGRADED)["status"] == "False"
    assert world.status["phase"] == "Running"
