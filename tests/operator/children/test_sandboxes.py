"""The broker of a job's machines: its objects, its rights, who reaches it, and who holds its token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from world import World, rljob, suspend

from plaudit_job.processes import machines_run
from plaudit_operator import names
from plaudit_operator.names import ConditionType, Reason
from plaudit_reward.pod_provider import RUN_LABEL
from plaudit_sandbox.machine import MachineLimits
from plaudit_sandbox.pod_manifests import PodSettings, agent_pod, claimed
from plaudit_sandbox.pod_manifests import tests_pod as pod_of_tests

POD_VARIABLE = "PLAUDIT_SANDBOXES_POD"
ROLE = "ClusterRole/plaudit-operator-sandboxes"
AGENT = {"kind": "tools", "tools": [{"sandbox": "bash"}]}
PROGRAM = {"kind": "endpoint", "command": ["my-agent"], "sandbox": True}
SANDBOXES = {"provider": "pods", "image": "debian:12", "warm": 2, "pod": {"template": {"spec": {}}}}


def world_of(role: str, agent: Any = AGENT, *, policies: bool = True, **sections: Any) -> World:
    world = World(rljob(sandboxes=SANDBOXES, rollout={"agent": agent}, **sections))
    world.settings = replace(world.settings, sandboxes_role=role, network_policies=policies)
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


def test_it_finds_its_pod_and_the_namespace_of_its_machines(world: World) -> None:
    [name] = [each for each in container(world, "Deployment", "job-sandboxes")["env"] if each["name"] == POD_VARIABLE]
    assert name["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    given = environment(world, "Deployment", "job-sandboxes")
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


def applies_to(policy: dict[str, Any], pod: dict[str, Any]) -> bool:
    """Tell whether a policy is for a pod."""
    assert policy["metadata"]["namespace"] == "default"
    return bool(policy["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items())


def machines_of(world: World) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the pods of an agent's machine and of its tests, as the broker of a job makes them."""
    folder = Path(environment(world, "Deployment", "job-sandboxes")["PLAUDIT_RUN_FOLDER"])
    settings, limits = PodSettings("debian:12", labels={RUN_LABEL: machines_run(folder)}), MachineLimits()
    agent = agent_pod("machine", settings, limits)
    return agent, pod_of_tests("machine-1", agent, settings, limits, is_separate=False)


@pytest.mark.parametrize("policies", [True, False])
def test_a_program_in_a_pod_reaches_the_endpoint_of_rollouts_and_its_tests_do_not(*, policies: bool) -> None:
    world = world_of(ROLE, PROGRAM, policies=policies)
    agent, tests = machines_of(world)
    rollout = container(world, "Deployment", "job-rollout")
    given = {each["name"]: each for each in rollout["env"]}
    assert given["PLAUDIT_ENDPOINT_HOST"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    port = int(given["PLAUDIT_ENDPOINT_PORT"]["value"])
    assert {"name": "endpoint", "containerPort": port} in rollout["ports"]
    others = [each["containerPort"] for each in rollout["ports"] if each["name"] != "endpoint"]
    opened = [{"protocol": "TCP", "port": port}]

    [policy] = [each for each in world.cluster.of_kind("NetworkPolicy") if applies_to(each, agent)]
    assert applies_to(policy, claimed(agent)[0]["spec"]["podTemplate"])  # of Agent Sandbox
    assert policy["spec"]["policyTypes"] == ["Egress"]
    [egress] = policy["spec"]["egress"]
    [peer] = egress["to"]
    assert peer == {"podSelector": {"matchLabels": {names.LABEL_JOB: "job", names.LABEL_ROLE: "rollout"}}}
    assert (egress["ports"], port in others) == (opened, False)
    assert not applies_to(policy, tests)

    ingress = world.cluster.find("NetworkPolicy", "job-rollout")
    assert bool(ingress) == policies
    if ingress:
        [rule] = ingress["spec"]["ingress"]
        assert rule == {"from": [{"podSelector": policy["spec"]["podSelector"]}], "ports": opened}


def test_machines_of_tools_reach_no_rollout(world: World) -> None:
    agent, _ = machines_of(world)
    assert not [each for each in world.cluster.of_kind("NetworkPolicy") if applies_to(each, agent)]
    assert "PLAUDIT_ENDPOINT_HOST" not in environment(world, "Deployment", "job-rollout")
    assert not world.cluster.find("NetworkPolicy", "job-rollout")


def test_its_state_is_a_role_of_the_status(world: World) -> None:
    roles = {role["name"]: role for role in world.status["roles"]}
    assert roles["sandboxes"]["desired"] == 1


def test_a_job_is_refused_where_the_operator_may_not_give_the_rights() -> None:
    refused = world_of("").condition(ConditionType.SPEC_VALID)
    assert (refused["status"], refused["reason"]) == ("False", Reason.INVALID)
    assert "sandboxes.pods to true" in refused["message"]


def with_machine(**sections: Any) -> World:
    """Return a settled job with one machine, which belongs to the ReplicaSet of its broker."""
    world = world_of(ROLE, **sections)
    deployment = world.cluster.find("Deployment", "job-sandboxes")
    for kind, owner in (("ReplicaSet", deployment), ("Pod", None)):
        owner = owner or world.cluster.find("ReplicaSet", "machine")
        assert owner
        metadata = {"name": "machine", "namespace": "default", "ownerReferences": [{"uid": owner["metadata"]["uid"]}]}
        world.cluster.put({"apiVersion": "v1", "kind": kind, "metadata": metadata, "spec": {}, "status": {}})
    return world


@pytest.mark.parametrize("cleanup", ["All", "KeepTransport", "None"])
@pytest.mark.parametrize("code", [0, names.EXIT_NO_RETRY])
def test_no_machine_outlives_an_ended_job(cleanup: str, code: int) -> None:
    world = with_machine(lifecycle={"cleanup": cleanup})
    world.cluster.end_trainer(code, "because")
    world.settle()
    assert world.status["phase"] == ("Failed" if code else "Complete")
    assert not world.cluster.find("Pod", "machine")
    assert bool(world.cluster.find("Deployment", "job-reward")) == (cleanup == "None")


def test_a_suspended_job_has_no_machines_and_a_resumed_one_makes_new_ones() -> None:
    world = with_machine()
    suspend(world, True)
    world.settle()
    assert world.status["phase"] == "Suspended"
    assert not world.cluster.find("Pod", "machine")
    world.cluster.calls.clear()
    world.reconcile()
    assert world.cluster.calls == []
    suspend(world, False)
    world.settle()
    assert world.status["phase"] == "Running"
    assert world.cluster.find("Deployment", "job-sandboxes")


def test_a_job_that_lost_its_place_in_a_queue_has_no_machines() -> None:
    world = with_machine(scheduling={"queueName": "team"})
    for pod in world.cluster.of_kind("Pod"):
        if pod["metadata"].get("labels", {}).get("plaudit.dev/role") in ("trainer", "rollout"):
            gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
            world.cluster.put({**pod, "status": {"phase": "Pending", "conditions": [gated]}})
    world.learn()
    assert not world.cluster.find("Pod", "machine")
