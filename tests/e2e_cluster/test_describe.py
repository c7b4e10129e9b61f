"""``kubectl get`` and ``kubectl describe`` report the problem of a job, and the remedy."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from paced_job import PacedJob
from real_cluster import Cluster
from training import NAMESPACE

pytestmark = pytest.mark.timeout(600)

NOWHERE = {"url": "redis://redis.nowhere.svc:6379/0"}
"""For troubles that come before Redis is asked: no pod of a Redis has to start."""
Job = dict[str, Any]


def scoring(name: str, transport: Job | None = None, **reward: Any) -> Job:
    """Return the smallest job, which only scores."""
    sections = {"scorers": [{"name": "gsm8k", "kind": "rule", "rule": "gsm8k"}], **reward}
    metadata = {"name": name, "namespace": NAMESPACE}
    spec = {"reward": sections, "transport": transport or {"managed": {"memory": "256Mi", "storage": "1Gi"}}}
    return {"apiVersion": "plaudit.dev/v1alpha1", "kind": "RLJob", "metadata": metadata, "spec": spec}


def workers(**pod: Any) -> dict[str, Any]:
    """``reward`` with something in the pods of its workers."""
    return {"workers": {"pod": pod}}


NOT_THERE = {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "not-there", "key": "token"}}}
_SIDE_BY_SIDE = (
    scoring("no-image", NOWHERE, **workers(image="localhost/missing:1")),
    scoring("no-memory", **workers(resources={"limits": {"memory": "24Mi"}})),
    scoring("no-secret", **workers(env=[NOT_THERE])),
    scoring("full", {"managed": {"memory": "32Mi", "storage": "1Gi"}}),
)
BEGUN = {job["metadata"]["name"]: job for job in _SIDE_BY_SIDE}
"""Jobs that begin together: one gets into its trouble while a test looks at another."""


def no_judge(cluster: Cluster) -> tuple[Job, Job]:
    """Return a job whose judge is nowhere, and the ConfigMap of its template."""
    judge = {
        "baseUrl": f"http://judge.{NAMESPACE}.svc:8000/v1",
        "model": "none",
        "promptTemplate": {"path": "judge.j2"},
        "parse": {"jsonPath": "$.score"},
    }
    job = PacedJob(cluster, "no-judge", 1000).manifest()
    scorer = {"name": "quality", "kind": "judge", "judge": judge, "timeoutSeconds": 5}
    job["spec"]["reward"] |= {"scorers": [scorer], "maxFailedShare": 1.0}
    template = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "no-judge", "namespace": NAMESPACE}}
    return job, {**template, "data": {"judge.j2": "{{ response }}"}}


@pytest.fixture(scope="module")
def begun(shared: Cluster) -> Iterator[dict[str, Job]]:
    """Apply the jobs that begin together, and yield them by name."""
    job, template = no_judge(shared)
    jobs = {**BEGUN, "no-judge": job}
    done = shared.apply(template, *jobs.values())
    assert done.returncode == 0, done.stderr
    yield jobs
    where = ("--namespace", NAMESPACE)
    shared.kubectl(*where, "delete", "rlj", *jobs, "--wait=false", "--ignore-not-found")
    shared.kubectl(*where, "delete", "configmap", "no-judge")


@pytest.fixture
def told(installed: Cluster, begun: dict[str, Job]) -> Iterator[Callable[..., str]]:
    """Apply a job that has not begun, wait for a reason, and check that describe shows it, these texts and an event."""
    made: list[str] = []

    def told(job: Job, kind: str, reason: str, *words: str, event: bool = True) -> str:
        name = job["metadata"]["name"]
        if name not in {*made, *begun}:
            made.append(name)
            done = installed.apply(job)
            assert done.returncode == 0, done.stderr

        def has_reason() -> bool:
            return installed.condition("rlj", name, NAMESPACE, kind).get("reason") == reason

        installed.until(f"{kind} says {reason}", has_reason)

        if event:
            installed.until("the event", lambda: reason in installed.warnings(name, NAMESPACE))
            words = (f"Warning {reason}", *words)
        said = " ".join(installed.kubectl("--namespace", NAMESPACE, "describe", "rlj", name).stdout.split())
        missing = [text for text in words if text not in said]
        assert not missing, said
        return said

    yield told
    for name in made:
        installed.kubectl("--namespace", NAMESPACE, "delete", "rlj", name, "--wait=false")


def test_gpus_that_no_node_has(shared: Cluster, told: Callable[..., str]):
    job = PacedJob(shared, "too-large", 10).manifest()
    job["spec"]["rollout"] |= {"engine": {"tensorParallelSize": 8}}
    job["spec"]["trainer"]["pod"] = {}
    job["spec"] |= {"files": {"configMap": "copy-digits"}, "transport": NOWHERE}
    said = told(job, "RolloutReady", "Unschedulable", "Insufficient nvidia.com/gpu", "spec.rollout.pod.resources")
    assert "Add nodes, or lower" in said


def test_an_image_that_cannot_be_pulled(told: Callable[..., str]):
    told(
        BEGUN["no-image"], "RewardReady", "ImagePullFailed", "localhost/missing:1", "set spec.reward.workers.pod.image"
    )


def test_a_reward_worker_that_needs_more_memory_than_it_may_have(told: Callable[..., str]):
    told(BEGUN["no-memory"], "RewardReady", "OutOfMemory", "Raise spec.reward.workers.pod.resources.limits.memory")


def test_a_secret_that_is_not_there(told: Callable[..., str], installed: Cluster):
    told(
        BEGUN["no-secret"],
        "RewardReady",
        "SecretOrConfigMissing",
        'secret "not-there" not found',
        "Create the secret not-there; the pods then start",
    )
    where = ("--namespace", NAMESPACE)
    installed.kubectl(*where, "create", "secret", "generic", "not-there", "--from-literal=token=x")
    try:

        def runs() -> bool:
            return bool(installed.get("rlj", "no-secret", NAMESPACE)["status"]["phase"] == "Running")

        installed.until("the pods start by themselves", runs)
    finally:
        installed.kubectl(*where, "delete", "secret", "not-there")


def test_reward_code_that_is_missing_and_then_broken_and_then_right(told: Callable[..., str], installed: Cluster):
    scorer = {"name": "mine", "kind": "python", "python": {"path": "reward.py", "function": "compute_score"}}
    job = scoring("bad-code", scorers=[scorer])
    job["spec"] |= {"files": {"configMap": "bad-code"}, "transport": NOWHERE}
    told(job, "SpecValid", "FilesMissing", "spec.files.configMap: ConfigMap 'bad-code' does not exist")
    code = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "bad-code", "namespace": NAMESPACE}}
    try:
        installed.apply({**code, "data": {"reward.py": "import math\ndef compute_score(:\n"}})
        told(job, "SpecValid", "FilesInvalid", "syntax error in line 2 of reward.py", "Fix the file", event=False)
        installed.apply({**code, "data": {"reward.py": "def compute_score(*_, **__):\n    return 1.0\n"}})
        told(job, "SpecValid", "Valid", "all objects of the job exist", event=False)
    finally:
        installed.kubectl("--namespace", NAMESPACE, "delete", "configmap", "bad-code")


def test_a_judge_that_cannot_be_reached(begun: dict[str, Job], told: Callable[..., str]):
    told(begun["no-judge"], "Degraded", "JudgeFailing", "scorer 'quality'", "Check the judge, its baseUrl, key")


def test_a_redis_that_is_full_and_the_columns_of_kubectl_get(installed: Cluster, told: Callable[..., str]):
    job = BEGUN["full"]
    told(job, "RewardReady", "Ready", event=False)

    def columns() -> list[str]:
        return installed.kubectl("--namespace", NAMESPACE, "get", "rlj", "full").stdout.splitlines()

    # On a busy machine a pod may miss a probe after its first: the job is then Degraded, and recovers.
    header, row = installed.until("Running", lambda: " Running " in (found := columns())[1] and found)
    assert header.split() == ["NAME", "PHASE", "STEP", "ROLLOUT", "REWARD", "VERDICT", "BACKLOG", "AGE"]
    assert row.split()[:3] == ["full", "Running", "1/1"]
    uid = installed.get("rlj", "full", NAMESPACE)["metadata"]["uid"][:8]
    passwords = installed.get("secret", f"full-redis-{uid}", NAMESPACE)["data"]
    admin = base64.b64decode(passwords["admin"]).decode()
    redis = ["exec", "full-redis-0", "--", "redis-cli", "--user", "admin", "--pass", admin]
    installed.kubectl("--namespace", NAMESPACE, *redis, "setrange", "ballast", str(15 * 2**20), "x")
    told(job, "Degraded", "RedisFull", "no prompt is admitted", "Raise spec.transport.managed.memory")
    installed.kubectl("--namespace", NAMESPACE, *redis, "unlink", "ballast")
    told(job, "Degraded", "Healthy", event=False)
