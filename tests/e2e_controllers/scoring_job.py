"""A job that only scores, on a cluster: create it, observe it, submit samples, delete it."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import images
import redis
from judge import PORT
from kubernetes import client, config
from real_cluster import Cluster

from plaudit_operator.names import redis_secret
from plaudit_operator.runtime.kinds import DEPLOYMENT
from plaudit_operator.runtime.kube import ApiServer
from plaudit_wire.names import CONSUMER_GROUPS, Names
from plaudit_wire.redis import RedisAddress
from plaudit_workers.service.client import Result, RewardClient

Measured = Callable[[str, float], None]
NAMESPACE = "training"
SLOTS = 8
JUDGED = {
    "name": "judged",
    "kind": "judge",
    "judge": {
        "baseUrl": f"http://judge.{NAMESPACE}.svc:{PORT}/v1",
        "model": "slow",
        "promptTemplate": {"path": "judge.j2"},
        "parse": {"regex": "score: ([0-9.]+)"},
    },
    "timeoutSeconds": 120,
}
_RESTRICTED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def start_judge(cluster: Cluster) -> None:
    """A fresh judge, with its prompt in a ConfigMap."""
    labels = {"app": "judge"}
    container = {
        "name": "judge",
        "image": images.WORKER,
        "command": ["python3", "-c", Path(__file__).with_name("judge.py").read_text()],
        "securityContext": _RESTRICTED,
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
    }
    user = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    pod = {"containers": [container], "securityContext": user, "terminationGracePeriodSeconds": 0}
    namespaced = {"namespace": NAMESPACE}
    done = cluster.apply(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "judge", "labels": labels, **namespaced}, "spec": pod},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "judge", **namespaced},
            "spec": {"selector": labels, "ports": [{"port": PORT}]},
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "judge", **namespaced},
            "data": {"judge.j2": "{{ response }}"},
        },
    )
    assert done.returncode == 0, done.stderr
    cluster.kubectl("--namespace", NAMESPACE, "wait", "--for=condition=Ready", "pod/judge", "--timeout=120s")


def asked(cluster: Cluster) -> Counter[str]:
    """Return the number of requests to the judge by sample."""
    path = f"/api/v1/namespaces/{NAMESPACE}/services/judge:{PORT}/proxy/"
    return Counter(json.loads(cluster.kubectl("get", "--raw", path).stdout))


def judged(prefix: str, count: int, seconds: float) -> list[dict[str, Any]]:
    """Samples that the judge takes so long for."""
    return [{"id": f"{prefix}-{i}", "response": f"{seconds} {prefix}-{i}"} for i in range(count)]


class ScoringJob:
    """One RLJob without a trainer, or a RewardService. Use it as a context manager: it deletes the job at the end.

    Args:
        cluster: a cluster with the chart installed.
        name: name of the job.
        autoscaling: autoscaling of its reward workers.
        kind: ``RLJob`` or ``RewardService``.
        **spec: sections of the spec; ``reward`` is merged.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        autoscaling: dict[str, Any] | None = None,
        kind: str = "RLJob",
        **spec: Any,
    ) -> None:
        self._kind = kind.lower()
        self.cluster = cluster
        self.name = name
        reward = {"scorers": [JUDGED], "timeoutSeconds": 150, **spec.pop("reward", {})}
        pod = {"resources": {"requests": {"cpu": "20m", "memory": "64Mi"}}}
        scaled = {"autoscaling": autoscaling} if autoscaling else {}
        reward["workers"] = {"maxConcurrentSamples": SLOTS, "processes": 1, "pod": pod, **scaled}
        sections = {
            "reward": reward,
            "files": {"configMap": "judge"},
            "transport": {"managed": {"memory": "256Mi", "storage": "1Gi"}},
        }
        head = {"apiVersion": "plaudit.dev/v1alpha1", "kind": kind}
        self._manifest = {**head, "metadata": {"name": name, "namespace": NAMESPACE}, "spec": sections | spec}
        self._kube = ApiServer(
            "tests", api=config.new_client_from_config(cluster.kubeconfig, client_configuration=_quiet())
        )

    def apply(self) -> None:
        """Create the job without waiting for it."""
        done = self.cluster.apply(self._manifest)
        assert done.returncode == 0, done.stderr

    def __enter__(self) -> Self:
        self.apply()
        self.cluster.until(f"{self.name} ready", self._ready, 900)
        job = self.cluster.get(self._kind, self.name, NAMESPACE)
        self.run: str = job["status"]["run"]
        secret = self.cluster.get("secret", redis_secret(self.name, job["metadata"]["uid"]), NAMESPACE)
        self._passwords = {user: base64.b64decode(word).decode() for user, word in secret["data"].items()}
        self._forward = PortForward(self.cluster, NAMESPACE, f"service/{self.name}-redis", 6379)
        keda = self.address_as("keda")
        self._redis = redis.Redis(port=self._forward.port, username=keda.username, password=keda.password)
        return self

    def address_as(self, user: str) -> RedisAddress:
        """Return the address of the run's Redis for one of its users."""
        return RedisAddress(f"redis://127.0.0.1:{self._forward.port}/0", self._passwords[user], user)

    def __exit__(self, *_: object) -> None:
        self._redis.close()
        self._forward.close()
        self.cluster.kubectl("--namespace", NAMESPACE, "delete", self._kind, self.name, "--wait=false", check=False)

    def _ready(self) -> bool:
        return self.condition("RewardReady").get("status") == "True"

    def condition(self, kind: str) -> dict[str, Any]:
        """Return a condition of the job; empty if it has none of that type."""
        return self.cluster.condition(self._kind, self.name, NAMESPACE, kind)

    @contextmanager
    def without(self, namespace: str, deployment: str) -> Iterator[None]:
        """Stop a controller of the cluster while the context lasts."""
        scale = ("--namespace", namespace, "scale", f"deployment/{deployment}")
        self.cluster.kubectl(*scale, "--replicas=0")
        try:
            yield
        finally:
            self.cluster.kubectl(*scale, "--replicas=1")

    def patch(self, **spec: Any) -> None:
        """Edit the spec."""
        change = json.dumps({"spec": spec})
        self.cluster.kubectl(
            "--namespace", NAMESPACE, "patch", self._kind, self.name, "--type=merge", "--patch", change
        )

    @property
    def workers(self) -> dict[str, Any]:
        """Return the Deployment of the reward workers."""
        return self._kube.get(DEPLOYMENT, NAMESPACE, f"{self.name}-reward")

    @property
    def replicas(self) -> int:
        """Return the desired number of reward workers."""
        wanted: int = self.workers["spec"]["replicas"]
        return wanted

    @property
    def ready(self) -> int:
        """Return the number of ready reward workers."""
        count: int = self.workers["status"].get("readyReplicas", 0)
        return count

    @property
    def writers_of_replicas(self) -> set[str]:
        """Return the field managers that last set the number of reward workers."""
        entries = self.workers["metadata"]["managedFields"]
        return {entry["manager"] for entry in entries if "f:replicas" in entry["fieldsV1"].get("f:spec", {})}

    @property
    def in_work(self) -> int:
        """Return the number of samples that are queued or being scored."""
        length: Any = self._redis.xlen(Names(self.run).samples)
        return int(length)

    @property
    def held(self) -> int:
        """Return the number of samples that workers have claimed and not finished."""
        found: Any = self._redis.xpending(Names(self.run).samples, CONSUMER_GROUPS["samples"])
        return int(found["pending"])

    def figure(self, name: str) -> float:
        """Return a series of the metrics service, summed over labels."""
        path = f"/api/v1/namespaces/{NAMESPACE}/services/{self.name}-metrics:9090/proxy/metrics"
        lines = self.cluster.kubectl("get", "--raw", path).stdout.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(rf"{name}[ {{]", line))

    def load(self, samples: list[dict[str, Any]]) -> Load:
        """Return a load that submits samples until all have results or its context ends."""
        return Load(self.address_as("client"), self.run, samples)


def _quiet() -> client.Configuration:
    return client.Configuration()


class Load(threading.Thread):
    """A client of a scoring service. Use it as a context.

    Attributes:
        results: what has come.
    """

    def __init__(self, address: RedisAddress, run: str, samples: list[dict[str, Any]]) -> None:
        super().__init__(daemon=True)
        self._client = RewardClient(address, run=run, wait_s=30)
        self._samples = samples
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self.results: list[Result] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()
        if self._error:
            raise self._error

    def run(self) -> None:
        """Submit the samples and receive their results."""
        try:
            asyncio.run(self._score())
        except BaseException as error:  # raised at the end of the context
            self._error = error

    async def _score(self) -> None:
        async with self._client as service:
            submitting = asyncio.create_task(service.submit(self._samples))
            await asyncio.sleep(0)
            taking = asyncio.create_task(self._take(service))
            while not taking.done() and not self._ended.is_set():
                await asyncio.wait([taking], timeout=0.2)
            for task in (submitting, taking):
                task.cancel()
            await asyncio.gather(submitting, taking, return_exceptions=True)

    async def _take(self, service: RewardClient) -> None:
        async for result in service.results():
            self.results.append(result)

    def finish(self, within_s: float) -> list[Result]:
        """Wait for all results: one per sample, each scored."""
        self.join(within_s)
        assert not self._error, self._error
        assert not self.is_alive(), f"{len(self.results)} of {len(self._samples)} results after {within_s:.0f} s"
        assert Counter(result.id for result in self.results) == Counter(sample["id"] for sample in self._samples)
        assert {result.outcome for result in self.results} == {"scored"}
        return self.results


@dataclass(frozen=True)
class Look:
    """One observation of a job."""

    at_s: float
    replicas: int
    in_work: int


class Watch:
    """Observes a job twice a second while the context lasts."""

    def __init__(self, job: ScoringJob) -> None:
        self._job = job
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._began = time.monotonic()
        self.looks: list[Look] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def seconds(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._began

    def _look(self) -> None:
        while not self._stop.wait(0.5):
            in_work = self._job.in_work  # read first: samples that end in between need no worker
            self.looks.append(Look(self.seconds, self._job.replicas, in_work))

    def too_few(self, samples_per_replica: int, since: int) -> list[Look]:
        """Return observations of fewer workers than the load requires, once ``since`` workers have run."""
        first = next(i for i, look in enumerate(self.looks) if look.replicas >= since)
        return [
            look
            for look in self.looks[first:]
            if look.replicas < min(since, math.ceil(look.in_work / samples_per_replica))
        ]


class PortForward:
    """``kubectl port-forward`` to one port.

    Attributes:
        port: here.
    """

    def __init__(self, cluster: Cluster, namespace: str, target: str, port: int) -> None:
        command = ["kubectl", "--namespace", namespace, "port-forward", target, f":{port}"]
        self._process = subprocess.Popen(command, env=cluster.environment, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout
        found = re.search(r"127\.0\.0\.1:(\d+)", self._process.stdout.readline())
        assert found, f"no way to {target}"
        self.port = int(found[1])

    def close(self) -> None:
        """Stop forwarding."""
        self._process.terminate()
        self._process.communicate()
