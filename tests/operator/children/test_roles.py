"""Environments, gateways and groups of rollouts: their objects, who reaches them, how their state is reported."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from world import World, rljob, settled

from plaudit_job.load import parse_job
from plaudit_job.problem import JobError
from plaudit_operator import names
from plaudit_operator.names import ConditionType
from plaudit_operator.observed import timestamp

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
def with_environments() -> World:
    job = rljob(environments=ENVIRONMENTS)
    return settled(job)


def named(world: World, kind: str, name: str) -> dict[str, Any]:
    return next(child for child in world.cluster.of_kind(kind) if child["metadata"]["name"] == name)


def container(world: World, name: str) -> dict[str, Any]:
    found: dict[str, Any] = named(world, "Deployment", name)["spec"]["template"]["spec"]["containers"][0]
    return found


def test_each_environment_is_a_deployment_behind_a_service(with_environments: World) -> None:
    sandbox, browser = container(with_environments, "job-env-sandbox"), container(with_environments, "job-env-browser")
    assert (sandbox["image"], "command" in sandbox) == ("registry.example/sandbox:1", False)
    assert sandbox["readinessProbe"]["httpGet"] == {"path": "/ok", "port": "http"}
    assert browser["command"] == ["python3", "/plaudit/browser.py"]
    assert browser["readinessProbe"]["tcpSocket"] == {"port": "http"}
    assert named(with_environments, "Deployment", "job-env-sandbox")["spec"]["replicas"] == 3
    for name, port in (("sandbox", 9000), ("browser", 8000)):
        service = named(with_environments, "Service", f"job-env-{name}")["spec"]
        pods = named(with_environments, "Deployment", f"job-env-{name}")["spec"]["template"]["metadata"]["labels"]
        assert service["selector"].items() <= pods.items()
        assert service["selector"]["plaudit.dev/environment"] == name
        assert [entry["port"] for entry in service["ports"]] == [port]


def test_an_environment_without_a_command_keeps_that_of_its_template() -> None:
    template = {"spec": {"containers": [{"name": "environment", "command": ["serve"]}]}}
    world = World(rljob(environments=[{"name": "own", "image": "own:1", "pod": {"template": template}}]))
    world.learn()
    assert container(world, "job-env-own")["command"] == ["serve"]


def test_an_environment_with_sessions_keeps_each_client_on_one_server(with_environments: World) -> None:
    kept = named(with_environments, "Service", "job-env-gym")["spec"]
    assert kept["sessionAffinity"] == "ClientIP"
    assert kept["sessionAffinityConfig"]["clientIP"]["timeoutSeconds"] <= 86_400  # Kubernetes refuses more
    spread = named(with_environments, "Service", "job-env-sandbox")["spec"]
    assert "sessionAffinity" not in spread  # one connection holds a session of OpenEnv


def test_an_environment_gets_no_access_to_the_run(with_environments: World) -> None:
    variables = {entry["name"] for entry in container(with_environments, "job-env-sandbox")["env"]}
    assert not [name for name in variables if name.startswith("PLAUDIT_")]
    assert {"PORT", "HOST"} <= variables


def test_agents_and_scorers_get_the_urls(with_environments: World) -> None:
    for name in ("job-rollout", "job-reward"):
        variables = {entry["name"]: entry.get("value") for entry in container(with_environments, name)["env"]}
        assert variables["PLAUDIT_ENVIRONMENT_SANDBOX_URL"] == "http://job-env-sandbox.default.svc:9000"
        assert variables["PLAUDIT_ENVIRONMENT_BROWSER_URL"] == "http://job-env-browser.default.svc:8000"


def test_only_pods_of_the_job_that_run_agents_and_scorers_are_let_in(with_environments: World) -> None:
    [ingress] = named(with_environments, "NetworkPolicy", "job-environment")["spec"]["ingress"]
    [peer] = ingress["from"]
    assert peer["podSelector"]["matchLabels"] == {"plaudit.dev/job": "job"}
    assert peer["podSelector"]["matchExpressions"][0]["values"] == ["rollout", "reward", "trainer"]
    assert [port["port"] for port in ingress["ports"]] == [8000, 9000]
    egress = named(with_environments, "NetworkPolicy", "job-reward")["spec"]["egress"]
    reached = {
        rule["to"][0]["podSelector"]["matchLabels"]["plaudit.dev/environment"]: rule["ports"][0]["port"]
        for rule in egress
        if "plaudit.dev/environment" in rule.get("to", [{}])[0].get("podSelector", {}).get("matchLabels", {})
    }
    assert reached == {"sandbox": 9000, "browser": 8000, "gym": 8000}


def test_the_state_of_an_environment_is_a_role_of_the_status(with_environments: World) -> None:
    roles = {role["name"]: role for role in with_environments.status["roles"]}
    assert (roles["environment/sandbox"]["desired"], roles["environment/browser"]["desired"]) == (3, 1)


@pytest.mark.parametrize(("name", "role"), [("env-gym", "environment/gym"), ("m-helpful", "model/helpful")])
def test_a_pod_that_a_finalizer_keeps_from_being_replaced_is_named_in_the_condition(name: str, role: str) -> None:
    model = {"name": "helpful", "kind": "model", "model": {"source": "/plaudit/model"}}
    world = settled(environments=ENVIRONMENTS, reward={"scorers": [model]})
    kept = next(
        pod["metadata"]["name"] for pod in world.cluster.of_kind("Pod") if f"job-{name}-" in pod["metadata"]["name"]
    )

    def ends(pod: dict[str, Any]) -> None:
        pod["metadata"] |= {"deletionTimestamp": timestamp(world.cluster.now), "finalizers": ["example.com/keep"]}

    world.cluster.edit("Pod", kept, ends)
    world.learn(2)
    told = world.condition(ConditionType.REWARD_READY)["message"]
    assert f"Pod {kept} waits for its finalizer example.com/keep" in told
    assert role in told


def test_the_list_of_roles_has_those_of_all_pods() -> None:
    model = {"name": "helpful", "kind": "model", "model": {"source": "/plaudit/model"}}
    agent = {"kind": "tools", "tools": [{"sandbox": "bash"}]}
    sections = {"environments": ENVIRONMENTS, "reward": {"scorers": [model]}, "rollout": {"agent": agent}}
    world = World(rljob(sandboxes={"provider": "pods", "image": "debian:12"}, **sections))
    world.settings = replace(world.settings, sandboxes_role="ClusterRole/machines")
    world.start_operator()
    world.settle()
    assert world.cluster.roles() | settled(service()).cluster.roles() == set(names.ROLES)


def service(**gateway: Any) -> dict[str, Any]:
    reward = {**rljob()["spec"]["reward"], "gateway": gateway}
    job = rljob()
    job["spec"] = {"reward": reward}
    return job


@pytest.fixture(scope="module")
def with_gateways() -> World:
    return settled(service(replicas=2))


def test_a_service_has_gateways_a_token_and_an_address(with_gateways: World):
    deployment = with_gateways.cluster.find("Deployment", "job-gateway")
    assert deployment
    assert deployment["spec"]["replicas"] == 2
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert environment["PLAUDIT_GATEWAY_PORT"] == "8710"
    assert environment["PLAUDIT_REDIS_USERNAME"] == "gateway"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["tokens"] == environment["PLAUDIT_GATEWAY_TOKENS"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    [secret] = [each for each in with_gateways.cluster.of_kind("Secret") if "-gateway-" in each["metadata"]["name"]]
    assert len(secret["stringData"]["client"]) >= 32
    assert with_gateways.cluster.find("Service", "job-gateway")
    assert with_gateways.cluster.find("PodDisruptionBudget", "job-gateway")
    assert with_gateways.job["status"]["url"] == "http://job-gateway.default.svc:8710"


def test_only_clients_reach_it_and_it_reaches_redis_only(with_gateways: World):
    policy = with_gateways.cluster.find("NetworkPolicy", "job-gateway")
    assert policy
    [ingress] = policy["spec"]["ingress"]
    assert {"podSelector": {"matchLabels": {"plaudit.dev/client": "job"}}} in ingress["from"]
    assert [port["port"] for port in ingress["ports"]] == [8710]
    assert len(policy["spec"]["egress"]) == 2
    redis = with_gateways.cluster.find("NetworkPolicy", "job-redis")
    assert redis
    roles = redis["spec"]["ingress"][0]["from"][0]["podSelector"]["matchExpressions"][0]["values"]
    assert "gateway" in roles


def test_a_job_with_a_trainer_has_none():
    world = settled()
    assert world.cluster.find("Deployment", "job-gateway") is None
    assert "url" not in world.job["status"]


def test_gateways_scale_without_a_restart_of_the_reward_workers(with_gateways: World):
    before = with_gateways.cluster.find("Deployment", "job-reward")
    with_gateways.cluster.edit("RLJob", "job", lambda job: job["spec"]["reward"]["gateway"].update(replicas=3))
    with_gateways.settle()
    after = with_gateways.cluster.find("Deployment", "job-gateway")
    assert after
    assert after["spec"]["replicas"] == 3
    reward = with_gateways.cluster.find("Deployment", "job-reward")
    assert before
    assert reward
    assert reward["spec"]["template"] == before["spec"]["template"]


def test_a_service_of_an_operator_without_gateways_keeps_none():
    world = settled(service())

    def forget(config: dict[str, Any]) -> None:
        templates = json.loads(config["data"]["templates.json"])
        del templates["gateway"]
        config["data"]["templates.json"] = json.dumps(templates)

    world.cluster.edit("ConfigMap", "job-job", forget)
    world.settle()
    assert world.cluster.find("Deployment", "job-gateway") is None
    assert world.status["phase"] == "Running"


ROLLOUT = {
    "engine": {"tensorParallelSize": 4, "arguments": {"block_size": 16}},
    "pod": {"nodeSelector": {"pool": "gpu"}, "priorityClassName": "low"},
    "groups": [
        {"name": "base", "replicas": 2, "pod": {"priorityClassName": "high"}},
        {
            "name": "spot",
            "replicas": 1,
            "podsPerReplica": 2,
            "engine": {"tensorParallelSize": 2, "arguments": {"seed": 1}},
            "pod": {"nodeSelector": {"pool": "spot"}, "gpuResource": "amd.com/gpu"},
        },
    ],
}


def running(**spec: Any) -> World:
    return settled(**{"rollout": ROLLOUT, **spec})


def template_of(world: World, kind: str, name: str) -> dict[str, Any]:
    found = world.cluster.find(kind, name)
    assert found
    pod: dict[str, Any] = found["spec"]["template"]["spec"]
    return pod


def test_each_group_has_objects_of_its_own_with_the_fields_it_gives_and_inherits():
    world = running()
    base, spot = template_of(world, "Deployment", "job-r-base"), template_of(world, "Job", "job-r-spot-0-0")
    assert base["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert spot["containers"][0]["resources"]["limits"] == {"amd.com/gpu": 1}
    assert (base["nodeSelector"], base["priorityClassName"]) == ({"pool": "gpu"}, "high")
    assert (spot["nodeSelector"], spot["priorityClassName"]) == ({"pool": "spot"}, "low")
    values = {variable["name"]: variable.get("value") for variable in spot["containers"][0]["env"]}
    assert values["PLAUDIT_ROLLOUT_GROUP"] == "spot"
    deployment = world.cluster.find("Deployment", "job-r-base")
    assert deployment
    assert deployment["spec"]["selector"]["matchLabels"][names.LABEL_ROLLOUT_GROUP] == "base"
    assert not world.cluster.find("Deployment", "job-rollout")
    assert world.status["replicas"]["rollout"] == "4/4"
    gpus = {role["name"]: role["gpus"] for role in world.status["cost"]["roles"]}
    assert (gpus["rollout/base"], gpus["rollout/spot"]) == (8, 2)


def pods_of_base(world: World) -> set[str]:
    return {pod["metadata"]["uid"] for pod in world.cluster.of_kind("Pod") if "r-base" in pod["metadata"]["name"]}


def test_replicas_of_a_group_may_change_to_none_and_back_while_others_go_on():
    world = running()
    kept = pods_of_base(world)
    scale(world, "spot", 0)
    assert not world.cluster.find("Job", "job-r-spot-0-0")
    assert world.status["replicas"]["rollout"] == "2/2"
    scale(world, "spot", 2)
    assert world.status["replicas"]["rollout"] == "6/6"
    assert kept == {
        pod["metadata"]["uid"] for pod in world.cluster.of_kind("Pod") if "r-base" in pod["metadata"]["name"]
    }
    assert world.condition(ConditionType.SPEC_VALID)["status"] == "True"


def scale(world: World, group: str, replicas: int) -> None:
    def edit(job: dict[str, Any]) -> None:
        next(each for each in job["spec"]["rollout"]["groups"] if each["name"] == group)["replicas"] = replicas

    world.cluster.edit("RLJob", "job", edit)
    world.settle()


def test_a_gang_counts_all_groups_and_fixes_their_sizes():
    world = running(scheduling={"gang": "native"})
    (group,) = world.cluster.of_kind("PodGroup")
    assert group["spec"]["schedulingPolicy"]["gang"]["minCount"] == 6  # 2 + 1 × 2 rollouts, trainer, Redis
    scale(world, "spot", 3)
    assert world.condition(ConditionType.SPEC_VALID)["reason"] == "ImmutableFieldChanged"
    assert world.status["replicas"]["rollout"] == "4/4"


def test_any_other_change_of_a_group_is_rejected():
    world = running()

    def edit(job: dict[str, Any]) -> None:
        job["spec"]["rollout"]["groups"][0]["pod"] = {"priorityClassName": "higher"}

    world.cluster.edit("RLJob", "job", edit)
    world.settle()
    assert world.condition(ConditionType.SPEC_VALID)["reason"] == "ImmutableFieldChanged"
    assert template_of(world, "Deployment", "job-r-base")["priorityClassName"] == "high"


FOUR_GPUS = {"resources": {"limits": {"nvidia.com/gpu": 4}}}


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"replicas": 2, "groups": [{"name": "a"}]}, "spec.rollout.replicas: counts workers without groups"),
        ({"groups": [{"name": "a"}, {"name": "a"}]}, "spec.rollout.groups[1].name: 'a' is used twice"),
        ({"groups": [{"name": "a", "replicas": 0}]}, "spec.rollout.groups: have no replicas at all"),
        ({"podsPerReplica": 3, "engine": {"tensorParallelSize": 4}}, "3 pods cannot share 4 GPUs"),
        ({"groups": [{"name": "a", "podsPerReplica": 2}]}, "spec.rollout.groups[0].podsPerReplica: 2 pods cannot"),
        (
            {"podsPerReplica": 2, "engine": {"tensorParallelSize": 4}, "pod": FOUR_GPUS},
            "contradicts tensorParallelSize × pipelineParallelSize ÷ podsPerReplica 2",
        ),
    ],
)  # fmt: skip
def test_contradictions_are_named(rollout: dict[str, Any], message: str):
    with pytest.raises(JobError) as raised:
        parse_job(rljob(rollout=rollout))
    assert message in str(raised.value)
