"""The HTTP front of a job that only scores, as the operator makes it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from world import World, rljob, settled


def service(**gateway: Any) -> dict[str, Any]:
    reward = {**rljob()["spec"]["reward"], "gateway": gateway}
    job = rljob()
    job["spec"] = {"reward": reward}
    return job


@pytest.fixture(scope="module")
def world() -> World:
    world = World(service(replicas=2))
    world.settle()
    return world


def test_a_service_has_gateways_a_token_and_an_address(world: World):
    deployment = world.cluster.find("Deployment", "job-gateway")
    assert deployment
    assert deployment["spec"]["replicas"] == 2
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert environment["PLAUDIT_GATEWAY_PORT"] == "8710"
    assert environment["PLAUDIT_REDIS_USERNAME"] == "gateway"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["tokens"] == environment["PLAUDIT_GATEWAY_TOKENS"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    [secret] = [each for each in world.cluster.of_kind("Secret") if "-gateway-" in each["metadata"]["name"]]
    assert len(secret["stringData"]["client"]) >= 32
    assert world.cluster.find("Service", "job-gateway")
    assert world.cluster.find("PodDisruptionBudget", "job-gateway")
    assert world.job["status"]["url"] == "http://job-gateway.default.svc:8710"


def test_only_clients_reach_it_and_it_reaches_redis_only(world: World):
    policy = world.cluster.find("NetworkPolicy", "job-gateway")
    assert policy
    [ingress] = policy["spec"]["ingress"]
    assert {"podSelector": {"matchLabels": {"plaudit.dev/client": "job"}}} in ingress["from"]
    assert [port["port"] for port in ingress["ports"]] == [8710]
    assert len(policy["spec"]["egress"]) == 2
    redis = world.cluster.find("NetworkPolicy", "job-redis")
    assert redis
    roles = redis["spec"]["ingress"][0]["from"][0]["podSelector"]["matchExpressions"][0]["values"]
    assert "gateway" in roles


def test_a_job_with_a_trainer_has_none():
    world = settled()
    assert world.cluster.find("Deployment", "job-gateway") is None
    assert "url" not in world.job["status"]


def test_gateways_scale_without_a_restart_of_the_reward_workers(world: World):
    before = world.cluster.find("Deployment", "job-reward")
    world.cluster.edit("RLJob", "job", lambda job: job["spec"]["reward"]["gateway"].update(replicas=3))
    world.settle()
    after = world.cluster.find("Deployment", "job-gateway")
    assert after
    assert after["spec"]["replicas"] == 3
    reward = world.cluster.find("Deployment", "job-reward")
    assert before
    assert reward
    assert reward["spec"]["template"] == before["spec"]["template"]


def test_a_service_of_an_operator_without_gateways_keeps_none():
    world = World(service())
    world.settle()

    def forget(config: dict[str, Any]) -> None:
        templates = json.loads(config["data"]["templates.json"])
        del templates["gateway"]
        config["data"]["templates.json"] = json.dumps(templates)

    world.cluster.edit("ConfigMap", "job-job", forget)
    world.settle()
    assert world.cluster.find("Deployment", "job-gateway") is None
    assert world.status["phase"] == "Running"
