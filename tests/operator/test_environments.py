"""Servers of ``spec.environments``: their objects, who reaches them, and how their state is reported."""

from __future__ import annotations

from typing import Any

import pytest
from world import World, rljob

ENVIRONMENTS = [
    {
        "name": "sandbox",
        "image": "registry.example/sandbox:1",
        "port": 9000,
        "replicas": 3,
        "readiness": {"path": "/ok"},
    },
    {"name": "browser", "command": ["python3", "/plaudit/browser.py"]},
    {"name": "gym", "command": ["python3", "/plaudit/gym.py"], "replicas": 2, "sessionAffinity": "clientIP"},
]


@pytest.fixture(scope="module")
def world() -> World:
    job = rljob(environments=ENVIRONMENTS)
    world = World(job)
    world.settle()
    return world


def named(world: World, kind: str, name: str) -> dict[str, Any]:
    return next(child for child in world.cluster.of_kind(kind) if child["metadata"]["name"] == name)


def container(world: World, name: str) -> dict[str, Any]:
    found: dict[str, Any] = named(world, "Deployment", name)["spec"]["template"]["spec"]["containers"][0]
    return found


def test_each_environment_is_a_deployment_behind_a_service(world: World) -> None:
    sandbox, browser = container(world, "job-env-sandbox"), container(world, "job-env-browser")
    assert (sandbox["image"], "command" in sandbox) == ("registry.example/sandbox:1", False)
    assert sandbox["readinessProbe"]["httpGet"] == {"path": "/ok", "port": "http"}
    assert browser["command"] == ["python3", "/plaudit/browser.py"]
    assert browser["readinessProbe"]["tcpSocket"] == {"port": "http"}
    assert named(world, "Deployment", "job-env-sandbox")["spec"]["replicas"] == 3
    for name, port in (("sandbox", 9000), ("browser", 8000)):
        service = named(world, "Service", f"job-env-{name}")["spec"]
        pods = named(world, "Deployment", f"job-env-{name}")["spec"]["template"]["metadata"]["labels"]
        assert service["selector"].items() <= pods.items()
        assert service["selector"]["plaudit.dev/environment"] == name
        assert [entry["port"] for entry in service["ports"]] == [port]


def test_an_environment_with_sessions_keeps_each_client_on_one_server(world: World) -> None:
    kept = named(world, "Service", "job-env-gym")["spec"]
    assert kept["sessionAffinity"] == "ClientIP"
    assert kept["sessionAffinityConfig"]["clientIP"]["timeoutSeconds"] <= 86_400  # Kubernetes refuses more
    spread = named(world, "Service", "job-env-sandbox")["spec"]
    assert "sessionAffinity" not in spread  # one connection holds a session of OpenEnv


def test_an_environment_gets_no_access_to_the_run(world: World) -> None:
    variables = {entry["name"] for entry in container(world, "job-env-sandbox")["env"]}
    assert not [name for name in variables if name.startswith("PLAUDIT_")]
    assert {"PORT", "HOST"} <= variables


def test_agents_and_scorers_get_the_urls(world: World) -> None:
    for name in ("job-rollout", "job-reward"):
        variables = {entry["name"]: entry.get("value") for entry in container(world, name)["env"]}
        assert variables["PLAUDIT_ENVIRONMENT_SANDBOX_URL"] == "http://job-env-sandbox.default.svc:9000"
        assert variables["PLAUDIT_ENVIRONMENT_BROWSER_URL"] == "http://job-env-browser.default.svc:8000"


def test_only_pods_of_the_job_that_run_agents_and_scorers_are_let_in(world: World) -> None:
    [ingress] = named(world, "NetworkPolicy", "job-environment")["spec"]["ingress"]
    [peer] = ingress["from"]
    assert peer["podSelector"]["matchLabels"] == {"plaudit.dev/job": "job"}
    assert peer["podSelector"]["matchExpressions"][0]["values"] == ["rollout", "reward", "trainer"]
    assert [port["port"] for port in ingress["ports"]] == [8000, 9000]
    egress = named(world, "NetworkPolicy", "job-reward")["spec"]["egress"]
    reached = {
        rule["to"][0]["podSelector"]["matchLabels"]["plaudit.dev/environment"]: rule["ports"][0]["port"]
        for rule in egress
        if "plaudit.dev/environment" in rule.get("to", [{}])[0].get("podSelector", {}).get("matchLabels", {})
    }
    assert reached == {"sandbox": 9000, "browser": 8000, "gym": 8000}


def test_the_state_of_an_environment_is_a_role_of_the_status(world: World) -> None:
    roles = {role["name"]: role for role in world.status["roles"]}
    assert (roles["environment/sandbox"]["desired"], roles["environment/browser"]["desired"]) == (3, 1)
