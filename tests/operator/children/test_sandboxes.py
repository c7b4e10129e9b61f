"""The broker of a job's machines: its objects, its rights, who reaches it, and who holds its token."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from world import World, rljob

from plaudit_operator.names import ConditionType, Reason

ROLE = "ClusterRole/plaudit-operator-sandboxes"
AGENT = {"kind": "tools", "tools": [{"sandbox": "bash"}]}
SANDBOXES = {"provider": "pods", "image": "debian:12", "warm": 2, "pod": {"template": {"spec": {}}}}


def world_of(role: str) -> World:
    world = World(rljob(sandboxes=SANDBOXES, rollout={"agent": AGENT}))
    world.settings = replace(world.settings, sandboxes_role=role)
    world.start_operator()
    world.relist()
    world.settle()
    return world


@pytest.fixture(scope="module")
def world() -> World:
    return world_of(ROLE)


def container(world: World, kind: str, name: str) -> dict[str, Any]:
    found = world.cluster.find(kind, name)
    assert found
    own: dict[str, Any] = found["spec"]["template"]["spec"]["containers"][0]
    return own


def environment(world: World, kind: str, name: str) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in container(world, kind, name)["env"]}


def test_the_broker_alone_has_an_account_with_rights(world: World) -> None:
    deployment = world.cluster.find("Deployment", "job-sandboxes")
    assert deployment
    assert (deployment["spec"]["replicas"], deployment["spec"]["strategy"]["type"]) == (1, "Recreate")
    pod = deployment["spec"]["template"]["spec"]
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("job-sandboxes", True)
    [binding] = world.cluster.of_kind("RoleBinding")
    assert binding["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "ClusterRole",
        "name": "plaudit-operator-sandboxes",
    }
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "job-sandboxes", "namespace": "default"}]
    assert world.cluster.find("ServiceAccount", "job-sandboxes")
    for kind, name in (("Deployment", "job-rollout"), ("Deployment", "job-reward"), ("Job", "job-trainer-0")):
        found = world.cluster.find(kind, name)
        assert found
        assert not found["spec"]["template"]["spec"]["automountServiceAccountToken"]


def test_its_machines_go_with_the_job(world: World) -> None:
    given = environment(world, "Deployment", "job-sandboxes")
    assert json.loads(given["PLAUDIT_SANDBOXES_OWNER"]) == {
        "apiVersion": "plaudit.dev/v1alpha1",
        "kind": "RLJob",
        "name": "job",
        "uid": world.job["metadata"]["uid"],
    }
    assert given["PLAUDIT_SANDBOXES_NAMESPACE"] == "default"
    assert given["PLAUDIT_REDIS_USERNAME"] == "sandboxes"
    assert "PLAUDIT_SANDBOXES_URL" not in given


def test_the_processes_that_use_machines_reach_it_with_its_token(world: World) -> None:
    assert world.cluster.find("Service", "job-sandboxes")
    [secret] = [each for each in world.cluster.of_kind("Secret") if "-sandboxes-" in each["metadata"]["name"]]
    assert len(secret["stringData"]["token"]) >= 32
    file = f"/run/plaudit/secrets/{secret['metadata']['name']}/token"
    users = (("Deployment", "job-rollout"), ("Deployment", "job-reward"), ("Job", "job-trainer-0"))
    for kind, name in (*users, ("Deployment", "job-sandboxes")):
        given, mounts = environment(world, kind, name), container(world, kind, name)["volumeMounts"]
        assert given["PLAUDIT_SANDBOXES_TOKEN_FILE"] == file
        assert any(file.startswith(f"{mount['mountPath']}/") and mount["readOnly"] for mount in mounts)
    for kind, name in users:
        assert environment(world, kind, name)["PLAUDIT_SANDBOXES_URL"] == "http://job-sandboxes.default.svc:8720"
    assert "PLAUDIT_SANDBOXES_URL" not in environment(world, "Deployment", "job-metrics")


def test_nobody_else_reaches_it(world: World) -> None:
    policy = world.cluster.find("NetworkPolicy", "job-sandboxes")
    assert policy
    [ingress] = policy["spec"]["ingress"]
    [peer] = ingress["from"]
    assert peer["podSelector"]["matchExpressions"][0]["values"] == ["rollout", "reward", "trainer"]
    assert [port["port"] for port in ingress["ports"]] == [8720]
    reward = world.cluster.find("NetworkPolicy", "job-reward")
    assert reward
    assert 8720 in [port["port"] for rule in reward["spec"]["egress"] for port in rule.get("ports", [])]
    redis = world.cluster.find("NetworkPolicy", "job-redis")
    assert redis
    assert "sandboxes" in redis["spec"]["ingress"][0]["from"][0]["podSelector"]["matchExpressions"][0]["values"]


def test_its_state_is_a_role_of_the_status(world: World) -> None:
    roles = {role["name"]: role for role in world.status["roles"]}
    assert roles["sandboxes"]["desired"] == 1


def test_a_job_is_refused_where_the_operator_may_not_give_the_rights() -> None:
    refused = world_of("").condition(ConditionType.SPEC_VALID)
    assert (refused["status"], refused["reason"]) == ("False", Reason.INVALID)
    assert "sandboxes.pods to true" in refused["message"]
