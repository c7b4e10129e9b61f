"""A scoring service under Pod Security restricted: its client gets in, and a hostile reward function gets nowhere."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import chart
import pytest
from real_cluster import Cluster

pytestmark = pytest.mark.timeout(1800)  # images may have to be built first

NAMESPACE, JOB = "secrecy", "guarded"
REDIS = f"{JOB}-redis.{NAMESPACE}.svc"
HOSTILE = f'''
import os
import redis

PREFIX = "plaudit:{{" + os.environ["PLAUDIT_RUN"] + "}}:"
COMMANDS = (
    ("HSET", PREFIX + "state", "announced", "x"),
    ("HINCRBY", PREFIX + "state", "incarnation", "1"),
    ("XADD", PREFIX + "samples", "*", "sample", "x"),
    ("FLUSHALL",),
    ("CONFIG", "GET", "*"),
    ("ACL", "LIST"),
)

def attack(data_source, solution_str, ground_truth, extra_info=None):
    reached = [name for name in os.environ if name.startswith(("PLAUDIT_SECRET", "PLAUDIT_REDIS"))]
    for name in ("environ", "mem", "maps"):
        try:
            with open(f"/proc/{{os.getppid()}}/{{name}}", "rb") as file:
                reached.append(file.name)
        except PermissionError:
            pass
    with open("/run/plaudit/redis/password") as file:  # the function runs as the worker's user
        password = file.read()
    client = redis.Redis(host="{REDIS}", username="reward", password=password)
    assert client.ping()
    for command in COMMANDS:
        try:
            client.execute_command(*command)
            reached.append(command[0])
        except redis.exceptions.NoPermissionError:
            pass
    for user in ("trainer", "admin", "client"):
        try:
            redis.Redis(host="{REDIS}", username=user, password=password).ping()
            reached.append(user)
        except redis.exceptions.AuthenticationError:
            pass
    return {{"score": float(len(reached)), "reached": " ".join(reached)}}
'''


def service() -> dict[str, Any]:
    scorer = {"name": "hostile", "kind": "python", "python": {"path": "hostile.py", "function": "attack"}}
    small = {"resources": {"requests": {"cpu": "50m", "memory": "64Mi"}}}
    spec = {
        "reward": {"scorers": [scorer], "workers": {"replicas": 1, "processes": 1, "pod": small}},
        "transport": {"managed": {"memory": "256Mi", "storage": "1Gi"}},
        "files": {"configMap": "code"},
    }
    metadata = {"name": JOB, "namespace": NAMESPACE}
    return {"apiVersion": "plaudit.dev/v1alpha1", "kind": "RLJob", "metadata": metadata, "spec": spec}


def client_pod(secret: str, run: str) -> dict[str, Any]:
    """``plaudit submit`` in the cluster, as the user ``client``, by the label that Redis's policy lets in."""
    submit = f"python3 -m plaudit_workers.cli submit /tmp/samples.jsonl --redis redis://{REDIS}:6379/0 --run {run}"
    container = {
        "name": "client",
        "image": chart.values()["images"]["worker"],
        "command": ["sh", "-c", f'echo \'{{"response": "a"}}\' > /tmp/samples.jsonl && {submit} --wait 120'],
        "env": [
            {"name": "PLAUDIT_REDIS_USERNAME", "value": "client"},
            {"name": "PLAUDIT_REDIS_PASSWORD_FILE", "value": "/run/secrets/redis/client"},
        ],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "redis", "mountPath": "/run/secrets/redis"}],
    }
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "fsGroup": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "redis", "secret": {"secretName": secret, "items": [{"key": "client", "path": "client"}]}}
        ],
    }
    metadata = {"name": "client", "namespace": NAMESPACE, "labels": {"plaudit.dev/client": JOB}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


@pytest.fixture
def running(installed: Cluster) -> Iterator[dict[str, Any]]:
    """The service, with its worker ready."""
    installed.kubectl("create", "namespace", NAMESPACE)
    installed.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
    code = {"metadata": {"name": "code", "namespace": NAMESPACE}, "data": {"hostile.py": HOSTILE}}
    made = installed.apply({"apiVersion": "v1", "kind": "ConfigMap", **code}, service())
    assert made.returncode == 0, made.stderr
    wait = ("wait", "--for=condition=RewardReady", f"rlj/{JOB}", "--timeout=300s")
    installed.kubectl("--namespace", NAMESPACE, *wait)
    yield installed.get("rlj", JOB, NAMESPACE)
    installed.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def test_a_client_gets_scores_and_a_hostile_function_gets_nowhere(installed: Cluster, running: dict[str, Any]) -> None:
    secrets = installed.get("secret", namespace=NAMESPACE)["items"]
    [secret] = [each for each in secrets if each["metadata"]["name"].startswith(f"{JOB}-redis-")]
    made = installed.apply(client_pod(secret["metadata"]["name"], running["status"]["run"]))
    assert made.returncode == 0, made.stderr

    def ended() -> bool:
        return installed.get("pod", "client", NAMESPACE)["status"]["phase"] in ("Succeeded", "Failed")

    installed.until("the client's end", ended)
    said = installed.kubectl("--namespace", NAMESPACE, "logs", "client").stdout
    assert installed.get("pod", "client", NAMESPACE)["status"]["phase"] == "Succeeded", said
    [score] = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert score["outcome"] == "scored", score
    assert score["score"] == 0.0, score["scorers"]

    # What the real processes did, Redis never had to deny; only what the function tried, as the user reward.
    admin = base64.b64decode(secret["data"]["admin"]).decode()
    log = ("exec", f"{JOB}-redis-0", "--", "redis-cli", "--user", "admin", "--pass", admin, "--no-auth-warning")
    denied = installed.kubectl("--namespace", NAMESPACE, *log, "--json", "ACL", "LOG", "128").stdout
    entries = json.loads(denied)
    assert {entry["username"] for entry in entries if entry["reason"] != "auth"} == {"reward"}
    assert {entry["object"].partition("|")[0].rpartition(":")[2] for entry in entries if entry["reason"] != "auth"} == {
        "state",
        "samples",
        "flushall",
        "config",
        "acl",
    }
