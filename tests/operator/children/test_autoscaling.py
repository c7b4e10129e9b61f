"""What KEDA and an HPA are told. That they do it is seen in tests/e2e_controllers."""

from __future__ import annotations

from typing import Any

import pytest
from world import World, rljob, settled


def scaled(autoscaling: dict[str, Any], **spec: Any) -> World:
    """A settled job whose reward workers an autoscaler counts."""
    pod = {"resources": {"requests": {"cpu": "1"}}}
    reward = rljob()["spec"]["reward"] | {"workers": {"autoscaling": autoscaling, "pod": pod}}
    return settled(reward=reward, **spec)


def spec_of(world: World, kind: str) -> dict[str, Any]:
    found = world.cluster.find(kind, "job-reward")
    assert found
    return found["spec"]


def test_keda_counts_waiting_and_claimed_entries_of_every_stream_that_reward_workers_read():
    world = scaled({"samplesPerReplica": 9})
    run = world.status["run"]
    spec = spec_of(world, "ScaledObject")
    triggers = {trigger["name"]: trigger["metadata"] for trigger in spec["triggers"]}
    assert {name: metadata["stream"] for name, metadata in triggers.items()} == {
        "samples": f"plaudit:{{{run}}}:samples",
        "groups": f"plaudit:{{{run}}}:groups",
    }
    # A group's name would make it pending or lag: the length of the stream is both together.
    assert all("consumerGroup" not in metadata for metadata in triggers.values())
    assert spec["advanced"]["scalingModifiers"] == {
        "formula": "samples + groups",
        "target": "9",
        "metricType": "AverageValue",
    }


def test_keda_receives_the_whole_address_of_an_external_redis():
    secret = {"name": "redis", "key": "word"}
    world = scaled({}, transport={"url": "rediss://redis.example:7000/3", "passwordSecret": secret})
    metadata = spec_of(world, "ScaledObject")["triggers"][0]["metadata"]
    assert metadata["address"] == "redis.example:7000"
    assert metadata["databaseIndex"] == "3"
    assert metadata["enableTLS"] == "true"
    (reference,) = spec_of(world, "TriggerAuthentication")["secretTargetRef"]
    assert reference == {"parameter": "password", "name": "redis", "key": "word"}


@pytest.mark.parametrize(
    ("provider", "kind", "way"),
    [
        ("keda", "ScaledObject", ("advanced", "horizontalPodAutoscalerConfig", "behavior")),
        ("hpa", "HorizontalPodAutoscaler", ("behavior",)),
    ],
)
def test_the_quiet_time_before_a_worker_ends_is_the_jobs(provider: str, kind: str, way: tuple[str, ...]):
    spec = spec_of(scaled({"provider": provider, "scaleDownAfterSeconds": 40}), kind)
    for name in way:
        spec = spec[name]
    assert spec["scaleDown"] == {"stabilizationWindowSeconds": 40}


def test_a_job_that_may_scale_to_zero_begins_with_one_worker_that_is_left_its_time():
    world = scaled({"minReplicas": 0})
    assert world.status["replicas"]["reward"] == "1/1"
    spec = spec_of(world, "ScaledObject")
    assert (spec["minReplicaCount"], spec["initialCooldownPeriod"]) == (0, 300)


def test_a_change_of_the_autoscaler_leaves_one_of_them():
    world = scaled({"provider": "keda"})
    world.cluster.edit(
        "RLJob", "job", lambda job: job["spec"]["reward"]["workers"]["autoscaling"].update(provider="hpa")
    )
    world.settle()
    assert {kind for kind, name in world.children() if name == "job-reward"} >= {"HorizontalPodAutoscaler"}
    assert world.cluster.find("ScaledObject", "job-reward") is None
    assert world.cluster.find("TriggerAuthentication", "job-reward") is None


@pytest.mark.parametrize(
    ("provider", "kind", "condition"),
    [
        ("keda", "ScaledObject", {"type": "Ready", "status": "False", "reason": "TriggerError", "message": "why"}),
        ("keda", "ScaledObject", {"type": "Fallback", "status": "True", "reason": "FallbackExists", "message": "why"}),
        (
            "hpa",
            "HorizontalPodAutoscaler",
            {"type": "ScalingActive", "status": "False", "reason": "FailedGetResourceMetric", "message": "why"},
        ),
    ],
)
def test_an_autoscaler_at_its_limit_is_reported_after_two_minutes(provider: str, kind: str, condition: dict[str, Any]):
    world = scaled({"provider": provider})
    say(world, kind, condition)
    world.cluster.now += 110
    world.settle()
    assert world.status["phase"] == "Running"
    world.cluster.now += 20
    world.settle()
    degraded = world.condition("Degraded")
    assert (world.status["phase"], degraded["reason"]) == ("Degraded", "AutoscalerFailing")
    assert f"{kind} job-reward" in degraded["message"]
    assert f"{condition['reason']}: why" in degraded["message"]
    say(world, kind, {**condition, "status": {"True": "False", "False": "True"}[condition["status"]]})
    assert world.status["phase"] == "Running"


@pytest.mark.parametrize(
    ("provider", "kind", "condition"),
    [
        ("hpa", "HorizontalPodAutoscaler", {"type": "ScalingActive", "status": "False", "reason": "ScalingDisabled"}),
        (
            "hpa",
            "HorizontalPodAutoscaler",
            {"type": "ScalingLimited", "status": "False", "reason": "DesiredWithinRange"},
        ),
        ("keda", "ScaledObject", {"type": "Active", "status": "False", "reason": "ScalerNotActive"}),
        ("keda", "ScaledObject", {"type": "Ready", "status": "Unknown"}),
    ],
)
def test_an_autoscaler_that_rests_or_has_not_looked_yet_degrades_nothing(
    provider: str, kind: str, condition: dict[str, Any]
):
    world = scaled({"provider": provider})
    say(world, kind, condition)
    world.cluster.now += 1000
    world.settle()
    assert world.status["phase"] == "Running"


def say(world: World, kind: str, condition: dict[str, Any]) -> None:
    """The autoscaler's controller writes a condition."""
    world.cluster.edit(kind, "job-reward", lambda item: item.update(status={"conditions": [condition]}))
    world.settle()
