"""Who gets to Redis as whom: users, files and variables of each pod, policies; the managed Redis runs for real."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import redis
from world import World, rljob, settled

from plaudit_operator import names
from plaudit_wire.redis_access import ADMIN, PROBE, users
from plaudit_workers.launch.redis import free_port
from plaudit_workers.stream.libraries import libraries

ROLES = {"trainer": "job-trainer-0", "rollout": "job-rollout", "reward": "job-reward", "metrics": "job-metrics"}
URL = "rediss://redis.example:7000/0"
KEDA = {"workers": {"autoscaling": {}, "pod": {"resources": {"requests": {"cpu": "1"}}}}}


def scoring_job(**spec: Any) -> dict[str, Any]:
    absent = dict.fromkeys(("model", "data", "algorithm", "rollout", "trainer"))
    return rljob(**absent, **spec)


@pytest.fixture(scope="module")
def world() -> World:
    return settled(rljob())


def pod(world: World, name: str) -> dict[str, Any]:
    found = next(
        item
        for kind in ("Deployment", "StatefulSet", "Job")
        for item in world.cluster.of_kind(kind)
        if item["metadata"]["name"] == name
    )
    spec: dict[str, Any] = found["spec"]["template"]["spec"]
    return spec


def told(spec: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value") for entry in spec["containers"][0]["env"]}


def redis_files(spec: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """What lies in the folder of Redis's files: path -> object and key."""
    [volume] = [volume for volume in spec["volumes"] if volume["name"] == "redis"]
    assert volume["projected"]["defaultMode"] == 0o440
    return {
        item["path"]: (source["name"], item["key"])
        for each in volume["projected"]["sources"]
        for source in each.values()
        for item in source["items"]
    }


def test_each_role_has_a_user_and_its_own_password_alone(world: World) -> None:
    secret = world.cluster.of_kind("Secret")[0]["metadata"]["name"]
    for role, name in ROLES.items():
        spec = pod(world, name)
        assert redis_files(spec) == {"password": (secret, role)}, role
        environment = told(spec)
        assert environment["PLAUDIT_REDIS_USERNAME"] == role
        assert environment["PLAUDIT_REDIS_PASSWORD_FILE"] == "/run/plaudit/redis/password"
        assert "PLAUDIT_REDIS_PASSWORD" not in environment
        [prepare] = spec["initContainers"]
        assert {"name": "redis", "mountPath": "/run/plaudit/redis", "readOnly": True} in prepare["volumeMounts"]


def test_no_pod_but_that_of_redis_has_the_password_of_the_admin_or_of_another_role(world: World) -> None:
    assert set(redis_files(pod(world, "job-redis"))) == {"users.acl", PROBE, ADMIN}
    for kind in ("Deployment", "StatefulSet", "Job"):
        for item in world.cluster.of_kind(kind):
            volumes = item["spec"]["template"]["spec"]["volumes"]
            has = f"'key': '{ADMIN}'" in str(volumes)
            assert has == (item["metadata"]["name"] == "job-redis"), item["metadata"]["name"]


def test_only_a_scoring_service_has_a_user_for_clients() -> None:
    data = settled(scoring_job()).cluster.of_kind("Secret")[0]["stringData"]
    assert "client" in data
    assert not {"trainer", "rollout"} & set(data)


class RedisPod:
    """The containers of the StatefulSet, run here, with the files of the Secret."""

    def __init__(self, world: World, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.data: dict[str, str] = world.cluster.of_kind("Secret")[0]["stringData"]
        self._pod = pod(world, "job-redis")
        [self._container] = self._pod["containers"]
        for name in ("data", "secret", "functions"):
            (folder / name).mkdir()
        for path in redis_files(self._pod):
            (folder / "secret" / path).write_text(self.data[path])
        [writer] = self._pod["initContainers"]
        subprocess.run([sys.executable, *map(self._here, writer["command"][1:])], check=True)

    def __enter__(self) -> RedisPod:
        environment = {name: self._here(value) for name, value in told(self._pod).items() if value}
        command = [self._here(word) for word in self._container["command"]]
        self._process = subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.DEVNULL)
        for _ in range(200):
            if self.probe() == 0:
                break
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def probe(self) -> int:
        """The exit status of the readiness probe."""
        command = self._container["readinessProbe"]["exec"]["command"][-1].replace(
            "redis-cli", f"redis-cli -p {self.port}"
        )
        return subprocess.run(["sh", "-c", self._here(command)], capture_output=True, check=False).returncode

    def client(self, user: str) -> redis.Redis:
        return redis.Redis(port=self.port, username=user, password=self.data[user])

    def _here(self, text: str) -> str:
        places = {
            "/run/plaudit/redis": f"{self.folder}/secret",
            "/tmp/redis.conf": f"{self.folder}/redis.conf",
            "dir /data": f"dir {self.folder}/data",
            "/functions": f"{self.folder}/functions",
            f"port {names.REDIS_PORT}": f"port {self.port}",
            f"-p {names.REDIS_PORT}": f"-p {self.port}",
        }
        for place, own in places.items():
            text = text.replace(place, own)
        return text


def test_the_managed_redis_admits_only_its_users(world: World, tmp_path: Path) -> None:
    with RedisPod(world, tmp_path) as managed:
        assert managed.probe() == 0
        for user in users(trains=True):
            with managed.client(user) as client:
                assert client.ping()
                if user != ADMIN:
                    with pytest.raises(redis.exceptions.NoPermissionError):
                        client.flushall()
        with redis.Redis(port=managed.port) as nobody, pytest.raises(redis.exceptions.AuthenticationError):
            nobody.ping()
        with managed.client(ADMIN) as client:
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}


def test_redis_is_probed_often_while_it_starts_and_seldom_afterwards_and_never_killed(world: World) -> None:
    [container] = pod(world, "job-redis")["containers"]
    startup, readiness = container["startupProbe"], container["readinessProbe"]
    assert startup["exec"] == readiness["exec"]
    assert startup["periodSeconds"] < readiness["periodSeconds"]
    assert "livenessProbe" not in container
    assert startup["periodSeconds"] * startup["failureThreshold"] > 7 * 24 * 3600  # its log may take hours to read


def test_a_probe_of_the_users_own_is_that_of_the_start_too() -> None:
    own = {"exec": {"command": ["valkey-cli", "ping"]}}
    template = {"spec": {"containers": [{"name": "redis", "readinessProbe": own}]}}
    world = settled(rljob(transport={"managed": {"pod": {"template": template}}}))
    [container] = pod(world, "job-redis")["containers"]
    assert container["startupProbe"]["exec"] == container["readinessProbe"]["exec"] == own["exec"]


def test_the_managed_redis_loads_the_functions_whenever_it_starts(world: World, tmp_path: Path) -> None:
    managed, needed = RedisPod(world, tmp_path), {library.name.encode() for library in libraries()}
    for _ in range(2):
        with managed, managed.client(ADMIN) as admin:
            deadline = time.monotonic() + 20
            while {each[1] for each in admin.function_list()} != needed and time.monotonic() < deadline:
                time.sleep(0.02)
            assert {each[1] for each in admin.function_list()} == needed
        shutil.rmtree(tmp_path / "data" / "appendonlydir")


TLS = {
    "caConfigMap": {"name": "authority", "key": "ca.crt"},
    "certificateSecret": {"name": "mine", "key": "tls.crt"},
    "keySecret": {"name": "mine", "key": "tls.key"},
}
TRANSPORT = {"url": URL, "username": "me", "passwordSecret": {"name": "word", "key": "p"}, "tls": TLS}


def test_certificates_of_an_external_redis_are_files_in_every_pod() -> None:
    world = settled(rljob(transport=TRANSPORT))
    for name in ROLES.values():
        spec = pod(world, name)
        assert redis_files(spec) == {
            "password": ("word", "p"),
            "ca.pem": ("authority", "ca.crt"),
            "certificate.pem": ("mine", "tls.crt"),
            "key.pem": ("mine", "tls.key"),
        }
        environment = {key: value for key, value in told(spec).items() if key.startswith("PLAUDIT_REDIS")}
        assert environment == {
            "PLAUDIT_REDIS_URL": URL,
            "PLAUDIT_REDIS_USERNAME": "me",
            "PLAUDIT_REDIS_PASSWORD_FILE": "/run/plaudit/redis/password",
            "PLAUDIT_REDIS_TLS_CA": "/run/plaudit/redis/ca.pem",
            "PLAUDIT_REDIS_TLS_CERTIFICATE": "/run/plaudit/redis/certificate.pem",
            "PLAUDIT_REDIS_TLS_KEY": "/run/plaudit/redis/key.pem",
        }
    assert world.cluster.of_kind("Secret") == []


def test_certificates_may_be_files_of_the_volume() -> None:
    files = {"caFile": "/plaudit/ca.pem", "checkServerName": False}
    environment = told(pod(settled(rljob(transport={"url": URL, "tls": files})), "job-reward"))
    assert environment["PLAUDIT_REDIS_TLS_CA"] == "/plaudit/ca.pem"
    assert environment["PLAUDIT_REDIS_TLS_CHECK_SERVER_NAME"] == "false"
    assert "PLAUDIT_REDIS_PASSWORD_FILE" not in environment


def test_keda_shows_the_same_certificates() -> None:
    world = settled(rljob(transport=TRANSPORT, reward={**rljob()["spec"]["reward"], **KEDA}))
    authentication = world.cluster.find("TriggerAuthentication", "job-reward")
    scaled = world.cluster.find("ScaledObject", "job-reward")
    assert authentication
    assert scaled
    secrets = {each["parameter"]: (each["name"], each["key"]) for each in authentication["spec"]["secretTargetRef"]}
    assert secrets == {"password": ("word", "p"), "cert": ("mine", "tls.crt"), "key": ("mine", "tls.key")}
    assert authentication["spec"]["configMapTargetRef"] == [{"parameter": "ca", "name": "authority", "key": "ca.crt"}]
    for trigger in scaled["spec"]["triggers"]:
        assert trigger["metadata"]["enableTLS"] == "true"
        assert trigger["metadata"]["usernameFromEnv"] == "PLAUDIT_REDIS_USERNAME"


def test_keda_is_a_user_of_its_own_in_the_managed_redis() -> None:
    world = settled(rljob(reward={**rljob()["spec"]["reward"], **KEDA}))
    authentication = world.cluster.find("TriggerAuthentication", "job-reward")
    assert authentication
    data = world.cluster.of_kind("Secret")[0]["stringData"]
    given = {each["parameter"]: data[each["key"]] for each in authentication["spec"]["secretTargetRef"]}
    assert given == {"username": "keda", "password": data["keda"]}


def policy(world: World, role: str) -> dict[str, Any]:
    found = world.cluster.find("NetworkPolicy", f"job-{role}")
    assert found
    assert found["spec"]["podSelector"] == {"matchLabels": {names.LABEL_JOB: "job", names.LABEL_ROLE: role}}
    spec: dict[str, Any] = found["spec"]
    return spec


def test_redis_lets_in_the_pods_that_use_it(world: World) -> None:
    spec = policy(world, "redis")
    assert spec["policyTypes"] == ["Ingress"]
    [rule] = spec["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": 6379}]
    [peer] = rule["from"]  # in the job's own namespace
    assert peer["podSelector"]["matchLabels"] == {names.LABEL_JOB: "job"}
    [expression] = peer["podSelector"]["matchExpressions"]
    assert set(expression["values"]) == set(ROLES)
    assert "namespaceSelector" not in peer


def test_redis_lets_in_keda_when_it_scales_and_clients_of_a_scoring_service() -> None:
    world = settled(scoring_job(reward={**rljob()["spec"]["reward"], **KEDA}))
    [rule] = policy(world, "redis")["ingress"]
    job, clients, elsewhere, keda = rule["from"]
    assert set(job["podSelector"]["matchExpressions"][0]["values"]) == {"gateway", "metrics", "reward"}
    assert clients == {"podSelector": {"matchLabels": {"plaudit.dev/client": "job"}}}  # in its own namespace
    trusted = {"matchLabels": {"plaudit.dev/client-of": "default"}}
    assert elsewhere == {"namespaceSelector": trusted, **clients}
    assert keda == {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}}


def test_only_the_ranks_of_a_trainer_reach_each_other(world: World) -> None:
    spec = policy(world, "trainer")
    [rule] = spec["ingress"]
    assert spec["policyTypes"] == ["Ingress"]
    assert rule == {"from": [{"podSelector": {"matchLabels": {names.LABEL_JOB: "job", names.LABEL_ROLE: "trainer"}}}]}


def test_a_reward_model_is_reached_by_the_jobs_reward_workers_alone() -> None:
    scorer = {"name": "rm", "kind": "model", "model": {"source": "/plaudit/rm"}}
    world = settled(rljob(reward={"scorers": [scorer]}))
    [rule] = policy(world, "model")["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": 8000}]
    assert rule["from"] == [{"podSelector": {"matchLabels": {names.LABEL_JOB: "job", names.LABEL_ROLE: "reward"}}}]
    assert world.cluster.find("NetworkPolicy", "job-trainer")


def test_the_pods_of_a_reward_model_that_takes_turns_reach_redis_as_a_user_of_their_own() -> None:
    model = {"source": "/plaudit/rm", "sleepDuringUpdates": True}
    world = settled(rljob(reward={"scorers": [{"name": "rm", "kind": "model", "model": model}]}))
    [to_redis] = policy(world, "redis")["ingress"]
    assert "model" in to_redis["from"][0]["podSelector"]["matchExpressions"][0]["values"]
    pods = world.cluster.find("Deployment", names.model_object("job", "rm"))["spec"]["template"]["spec"]
    [server] = pods["containers"]
    environment = {entry["name"]: entry.get("value") for entry in server["env"]}
    assert server["command"] == ["python3", "-m", "plaudit_workers.launch.served_models"]
    assert environment["PLAUDIT_REDIS_USERNAME"] == "model"
    assert (environment["PLAUDIT_MODEL_SERVER"], environment["PLAUDIT_MODEL_SERVER_PORT"]) == ("rm", "8000")
    assert len({volume["name"] for volume in pods["volumes"]}) == len(pods["volumes"])


def test_metrics_are_open_on_their_port_alone(world: World) -> None:
    spec = policy(world, "metrics")
    assert spec["policyTypes"] == ["Ingress"]
    assert spec["ingress"] == [{"ports": [{"protocol": "TCP", "port": 9090}]}]


def test_reward_workers_reach_dns_and_redis_and_nothing_else(world: World) -> None:
    spec = policy(world, "reward")
    assert "ingress" not in spec
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    dns, to_redis = spec["egress"]
    assert {(port["protocol"], port["port"]) for port in dns["ports"]} == {("UDP", 53), ("TCP", 53)}
    assert to_redis == {
        "to": [{"podSelector": {"matchLabels": {names.LABEL_JOB: "job", names.LABEL_ROLE: "redis"}}}],
        "ports": [{"protocol": "TCP", "port": 6379}],
    }


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        (URL, {"ports": [{"protocol": "TCP", "port": 7000}]}),
        (
            "redis://redis.stores.svc:6379/0",
            {"to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "stores"}}}]},
        ),
    ],
)
def test_reward_workers_reach_an_external_redis(url: str, rule: dict[str, Any]) -> None:
    world = settled(rljob(transport={"url": url}))
    assert policy(world, "reward")["egress"][1] == rule
    assert world.cluster.find("NetworkPolicy", "job-redis") is None


def test_declared_egress_is_added() -> None:
    rules = [{"cidr": "10.1.0.0/16", "ports": [8443]}, {"podSelector": {"matchLabels": {"app": "sandbox"}}}]
    job = rljob(reward={**rljob()["spec"]["reward"], "networkPolicy": {"egress": rules}})
    *_, cidr, pods = policy(settled(job), "reward")["egress"]
    assert cidr == {"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}], "ports": [{"protocol": "TCP", "port": 8443}]}
    assert pods == {"to": [{"podSelector": {"matchLabels": {"app": "sandbox"}}}]}


def test_the_file_of_users_is_written_for_this_run(world: World) -> None:
    text = world.cluster.of_kind("Secret")[0]["stringData"]["users.acl"]
    run = world.status["run"]
    assert all(f"plaudit:{{{run}}}:" in line or "+@all" in line for line in text.splitlines()[1:])
