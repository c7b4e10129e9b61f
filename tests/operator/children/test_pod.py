"""What the children look like: security, what processes are told, who may speak to whom."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from world import World, rljob, settled

from plaudit_job.load import load_job
from plaudit_operator.children.pod import strategic_merge
from plaudit_wire.redis_access import users

MODEL = {"name": "helpful", "kind": "model", "model": {"source": "/plaudit/rm", "replicas": 2}}
JUDGE = {
    "name": "judge",
    "kind": "judge",
    "judge": {
        "baseUrl": "https://judge.example/v1",
        "model": "big",
        "apiKeySecret": {"name": "judge", "key": "token"},
        "promptTemplate": {"path": "/plaudit/judge.j2"},
        "parse": {"regex": "(.)"},
    },
}


def served(name: str, kind: str, **section: Any) -> dict[str, Any]:
    return {"name": name, "kind": kind, kind: {**section, "serve": {"source": "/plaudit/big", "replicas": 3}}}


def full_job() -> dict[str, Any]:
    job = rljob(trainer={"ranks": 4, "ranksPerPod": 1, "strategy": "fsdp2"})
    job["spec"]["reward"]["scorers"] += [MODEL, JUDGE]
    return job


@pytest.fixture(scope="module")
def world() -> World:
    return settled(full_job())


def templates(world: World) -> Iterator[tuple[str, dict[str, Any]]]:
    for kind in ("Deployment", "StatefulSet", "Job"):
        for owner in world.cluster.of_kind(kind):
            yield owner["metadata"]["name"], owner["spec"]["template"]


def environment(container: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


def test_every_pod_meets_pod_security_restricted(world: World):
    for name, template in templates(world):
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert pod["automountServiceAccountToken"] is False, name
        for container in pod["containers"] + pod.get("initContainers", []):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["capabilities"] == {"drop": ["ALL"]}, name
            assert security["readOnlyRootFilesystem"] is True, name
        assert not any("hostPath" in volume for volume in pod["volumes"]), name


def test_a_pod_that_waits_for_redis_ends_on_sigterm(world: World, tmp_path: Path):
    """As process 1 it would else hold its GPUs for its whole grace period: nothing ends what handles no signal."""
    [waiting] = dict(templates(world))["job-rollout"]["spec"]["initContainers"]
    told = {"PLAUDIT_RUN_FOLDER": str(tmp_path), "PLAUDIT_REDIS_URL": "redis://127.0.0.1:1/0"}
    command = [sys.executable, *waiting["command"][1:]]
    with subprocess.Popen(command, env=told, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline().startswith("waiting for Redis at 127.0.0.1:1")
        process.terminate()
        assert process.wait(10) == 128 + signal.SIGTERM


def test_no_password_stands_in_an_object_but_the_secret(world: World):
    data = world.cluster.of_kind("Secret")[0]["stringData"]
    passwords = [data[user] for user in users(trains=True)]
    assert len(set(passwords)) == 9
    assert all(len(password) >= 40 for password in passwords)
    for item in world.cluster.objects.values():
        if item["kind"] != "Secret":
            assert not any(password in str(item) for password in passwords), item["metadata"]["name"]


def test_processes_receive_all_addresses(world: World):
    told = dict(templates(world))
    run = world.status["run"]
    reward = environment(told["job-reward"]["spec"]["containers"][0])
    assert reward["PLAUDIT_JOB"] == "/etc/plaudit/job.yaml"
    assert reward["PLAUDIT_RUN"] == run
    assert reward["PLAUDIT_RUN_FOLDER"] == f"/plaudit/runs/default/{run}"
    assert reward["PLAUDIT_REDIS_URL"] == "redis://job-redis.default.svc:6379/0"
    assert reward["PLAUDIT_REDIS_PASSWORD_FILE"] == "/run/plaudit/redis/password"
    assert reward["PLAUDIT_MODEL_SERVERS"] == '{"helpful": ["http://job-m-helpful.default.svc:8000"]}'
    mounts = {mount["mountPath"] for mount in told["job-reward"]["spec"]["containers"][0]["volumeMounts"]}
    assert {"/etc/plaudit", "/plaudit", "/run/plaudit/redis", "/run/plaudit/secrets/judge", "/tmp"} <= mounts


def test_the_model_of_a_judge_or_of_a_function_is_served_as_a_reward_model_is():
    job = full_job()
    grades = {name: JUDGE["judge"][name] for name in ("promptTemplate", "parse")}
    scorers = [served("grades", "judge", **grades), served("router", "python", path="/plaudit/reward.py")]
    job["spec"]["reward"]["scorers"] += scorers
    world = settled(job)
    for scorer in scorers:
        deployment = world.cluster.find("Deployment", f"job-m-{scorer['name']}")
        assert deployment
        assert deployment["spec"]["replicas"] == 3
        container = deployment["spec"]["template"]["spec"]["containers"][0]
        line = " ".join(container["command"])
        assert f"--model /plaudit/big --served-model-name {scorer['name']} /plaudit/big" in line
        assert "--runner generate" in line
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
        assert world.cluster.find("Service", f"job-m-{scorer['name']}")
    reward = environment(dict(templates(world))["job-reward"]["spec"]["containers"][0])
    servers = {name: [f"http://job-m-{name}.default.svc:8000"] for name in ("helpful", "grades", "router")}
    assert json.loads(reward["PLAUDIT_MODEL_SERVERS"]) == servers


def test_ranks_find_each_other(world: World):
    job = world.cluster.find("Job", "job-trainer-0")
    assert job
    assert job["spec"]["completions"] == 4
    told = environment(job["spec"]["template"]["spec"]["containers"][0])
    assert told["MASTER_ADDR"] == "job-trainer-0-0.job-trainer.default.svc"
    assert told["WORLD_SIZE"] == "4"
    assert told["RANK"] == {
        "fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    }
    service = world.cluster.find("Service", "job-trainer")
    assert service
    assert service["spec"]["publishNotReadyAddresses"] is True


def test_a_model_is_downloaded_to_a_volume_with_and_without_a_claim(world: World):
    scores = dict.fromkeys(("model", "data", "algorithm", "rollout", "trainer", "storage"))
    alone = settled(**scores, reward={"scorers": [MODEL]})
    for a_world, folder in ((world, "/plaudit"), (alone, "/home/plaudit")):
        container = dict(templates(a_world))["job-m-helpful"]["spec"]["containers"][0]
        assert environment(container)["HF_HOME"] == f"{folder}/huggingface"
        assert folder in [mount["mountPath"] for mount in container["volumeMounts"]]


def test_gpus_follow_from_the_engine(world: World):
    told = dict(templates(world))
    for name in ("job-rollout", "job-trainer-0", "job-m-helpful"):
        limits = told[name]["spec"]["containers"][0]["resources"]["limits"]
        assert limits == {"nvidia.com/gpu": 1}, name
    assert "limits" not in told["job-reward"]["spec"]["containers"][0]["resources"]


def test_the_job_file_is_readable_by_the_processes(world: World, tmp_path):
    config = world.cluster.find("ConfigMap", "job-job")
    assert config
    (tmp_path / "job.yaml").write_text(config["data"]["job.yaml"])
    assert load_job(tmp_path / "job.yaml").spec.rollout.replicas == 2


def test_reward_workers_reach_only_the_declared_endpoints(world: World):
    policy = world.cluster.find("NetworkPolicy", "job-reward")
    assert policy
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in policy["spec"]
    dns, redis, models, judge = policy["spec"]["egress"]
    assert {port["port"] for port in dns["ports"]} == {53}
    assert redis["to"][0]["podSelector"]["matchLabels"]["plaudit.dev/role"] == "redis"
    assert models["to"][0]["podSelector"]["matchLabels"]["plaudit.dev/role"] == "model"
    assert judge["to"][0]["ipBlock"]["cidr"] == "0.0.0.0/0"
    assert "169.254.0.0/16" in judge["to"][0]["ipBlock"]["except"]
    assert judge["ports"] == [{"protocol": "TCP", "port": 443}]


def test_only_rollouts_reach_the_ports_on_which_the_trainer_offers_weights():
    job = full_job()
    closed = settled(job)
    assert len(closed.cluster.find("NetworkPolicy", "job-trainer")["spec"]["ingress"]) == 1
    job["spec"]["trainer"] = {"ranks": 2, "strategy": "fsdp2", "weights": {"transfer": "direct"}}
    world = settled(job)
    ranks, rollouts = world.cluster.find("NetworkPolicy", "job-trainer")["spec"]["ingress"]
    assert "ports" not in ranks
    assert rollouts["from"][0]["podSelector"]["matchLabels"]["plaudit.dev/role"] == "rollout"
    assert rollouts["ports"] == [{"protocol": "TCP", "port": 29510, "endPort": 29511}]
    trainer = dict(templates(world))["job-trainer-0"]["spec"]["containers"][0]
    assert environment(trainer)["PLAUDIT_WEIGHTS_PORT"] == "29510"


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("https://judge.example:8443/v1", {"cidr": "0.0.0.0/0", "port": 8443}),
        ("http://203.0.113.7/v1", {"cidr": "0.0.0.0/0", "port": 80}),
        ("http://10.96.0.15:8000/v1", {"cidr": "10.96.0.15/32", "port": 8000}),
        ("https://[fd00::7]:8000/v1", {"cidr": "fd00::7/128", "port": 8000}),
    ],
)
def test_a_judge_is_reached_at_the_port_and_address_of_its_url(url: str, rule: dict[str, Any]):
    job = full_job()
    job["spec"]["reward"]["scorers"][2]["judge"]["baseUrl"] = url
    world = settled(job)
    policy = world.cluster.find("NetworkPolicy", "job-reward")
    assert policy
    judge = policy["spec"]["egress"][3]
    assert (judge["to"][0]["ipBlock"]["cidr"], judge["ports"][0]["port"]) == (rule["cidr"], rule["port"])


def test_a_judge_inside_the_cluster_becomes_its_namespace():
    job = full_job()
    job["spec"]["reward"]["scorers"][2]["judge"]["baseUrl"] = "http://vllm.models.svc.cluster.local:8000/v1"
    world = settled(job)
    policy = world.cluster.find("NetworkPolicy", "job-reward")
    assert policy
    assert policy["spec"]["egress"][-1]["to"] == [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "models"}}}
    ]


def test_reward_workers_may_reach_the_endpoint_of_an_http_scorer_and_read_its_key():
    job = full_job()
    endpoint = {
        "url": "https://rewards.example:8443/v1/score",
        "shape": "plaudit",
        "apiKeySecret": {"name": "theirs", "key": "token"},
    }
    job["spec"]["reward"]["scorers"][2] = {"name": "theirs", "kind": "http", "http": endpoint}
    world = settled(job)
    policy = world.cluster.find("NetworkPolicy", "job-reward")
    assert policy
    assert policy["spec"]["egress"][-1]["ports"] == [{"protocol": "TCP", "port": 8443}]
    assert policy["spec"]["egress"][-1]["to"][0]["ipBlock"]["cidr"] == "0.0.0.0/0"
    deployment = world.cluster.find("Deployment", "job-reward")
    assert deployment
    mounts = deployment["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert "/run/plaudit/secrets/theirs" in {mount["mountPath"] for mount in mounts}


def test_an_applied_deployment_never_holds_replicas(world: World):
    calls = [call for call in world.cluster.calls if call.startswith("apply Deployment")]
    assert calls == []
    reward = next(c for c in world.cluster.of_kind("Deployment") if c["metadata"]["name"] == "job-reward")
    assert reward["spec"]["replicas"] == 2


def test_a_changed_limit_restarts_the_reward_workers_alone():
    job = full_job()
    job["spec"]["reward"]["scorers"][2]["limits"] = {"concurrency": 1}
    world = settled(job)
    before = dict(templates(world))

    def change(item: dict[str, Any]) -> None:
        item["spec"]["reward"]["scorers"][2]["limits"] = {"concurrency": 2}

    world.cluster.edit("RLJob", "job", change)
    inputs = {d["metadata"]["name"]: d["metadata"]["annotations"] for d in world.cluster.of_kind("Deployment")}
    world.settle()
    after = {d["metadata"]["name"]: d["metadata"]["annotations"] for d in world.cluster.of_kind("Deployment")}
    assert {name for name in inputs if inputs[name] != after[name]} == {"job-reward"}
    assert {name for name, template in templates(world) if template != before[name]} <= {"job-reward"}


def test_pod_template_is_merged_as_kubernetes_merges():
    base = {
        "containers": [{"name": "a", "image": "x", "env": [{"name": "A", "value": "1"}]}],
        "tolerations": [{"key": "k"}],
        "nodeSelector": {"a": "b"},
    }
    patch = {
        "containers": [{"name": "a", "env": [{"name": "B", "value": "2"}]}, {"name": "sidecar", "image": "y"}],
        "tolerations": [{"key": "other"}],
        "nodeSelector": None,
    }
    assert strategic_merge(base, patch) == {
        "containers": [
            {"name": "a", "image": "x", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
            {"name": "sidecar", "image": "y"},
        ],
        "tolerations": [{"key": "other"}],
    }


def every_role(pod: dict[str, Any]) -> dict[str, Any]:
    """A job all of whose roles have these fields of their pods."""
    job = rljob(trainer={"pod": pod}, metrics={"pod": pod}, transport={"managed": {"pod": pod}})
    job["spec"]["rollout"]["pod"] = pod
    job["spec"]["reward"]["workers"]["pod"] = pod
    job["spec"]["reward"]["scorers"].append({**MODEL, "model": {**MODEL["model"], "pod": pod}})
    job["spec"]["environments"] = [{"name": "shop", "image": "shop:1", "port": 80, "pod": pod}]
    return job


def test_resources_of_a_role_reach_every_container_of_its_pods():
    asked = {
        "requests": {"cpu": "2", "ephemeral-storage": "1Gi"},
        "limits": {"cpu": "4", "memory": "1Gi", "ephemeral-storage": "2Gi"},
    }
    world = settled(every_role({"resources": asked}))
    seen = set()
    for name, template in templates(world):
        for container in [*template["spec"]["containers"], *template["spec"].get("initContainers", [])]:
            resources = container["resources"]
            assert asked["requests"].items() <= resources["requests"].items(), (name, container["name"])
            assert asked["limits"].items() <= resources["limits"].items(), (name, container["name"])
            assert "nvidia.com/gpu" not in resources["limits"] or container["name"] in ("trainer", "rollout", "model")
            seen.add(container["name"])
    assert {"prepare", "functions"} <= seen


def test_small_containers_are_small_where_a_role_asks_for_nothing(world: World):
    asked = {}
    for _, template in templates(world):
        asked |= {each["name"]: each["resources"] for each in template["spec"].get("initContainers", [])}
    assert asked["prepare"] == {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "128Mi"}}
    large = settled(metrics={"pod": {"resources": {"requests": {"memory": "1Gi"}}}})
    found = dict(templates(large))["job-metrics"]["spec"]["initContainers"][0]["resources"]
    assert found == {"requests": {"cpu": "10m", "memory": "1Gi"}, "limits": {}}
