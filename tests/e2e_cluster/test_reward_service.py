"""A RewardService under load, from outside and through two jobs that share it: its scorer changes, and is compared with
that of another service before it counts."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import training
from real_cluster import Cluster, harness

pytestmark = pytest.mark.timeout(900)

SERVICE, NEXT, JOBS = "shared", "shared-next", ("user-a", "user-b")
SLOTS = {"maxConcurrentSamples": 4}
"""So few that samples wait, and callers have to share."""
SCORE_S = 0.1
"""So long that the loads leave the cores to the pods that start meanwhile, not so long that hundreds take minutes."""
LOAD = Path(__file__).with_name("service_load.py")
TRANSPORT = {"managed": {"memory": "256Mi", "storage": "1Gi"}}
SCORER = {"name": "mine", "kind": "python", "python": {"path": "reward.py"}}


def code(value: float) -> dict[str, Any]:
    source = f"import time\n\ndef compute_score(sample):\n    time.sleep({SCORE_S})\n    return {value}\n"
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"reward-{value:.0f}", "namespace": training.NAMESPACE},
        "data": {"reward.py": source},
    }


def document(kind: str, name: str, *scorers: dict[str, Any], **spec: Any) -> dict[str, Any]:
    reward = {"scorers": list(scorers), **spec.pop("reward", {})}
    return {
        "apiVersion": "plaudit.dev/v1alpha1",
        "kind": kind,
        "metadata": {"name": name, "namespace": training.NAMESPACE},
        "spec": {"reward": reward, "transport": TRANSPORT, **spec},
    }


@dataclass(frozen=True)
class Load:
    """A program that submits samples."""

    results: Path
    stop: Path
    process: subprocess.Popen[bytes]

    def scored(self) -> list[dict[str, Any]]:
        lines = self.results.read_text().splitlines() if self.results.exists() else []
        return [json.loads(line) for line in lines]

    def end(self) -> list[dict[str, Any]]:
        """Let every submitted sample get its result."""
        self.stop.touch()
        assert self.process.wait(120) == 0
        return self.scored()


def token_of(cluster: Cluster, name: str) -> str:
    secrets = cluster.get("secret", namespace=training.NAMESPACE)["items"]
    [token] = [
        each["data"]["client"] for each in secrets if re.match(rf"{name}-gateway-\w+$", each["metadata"]["name"])
    ]
    return base64.b64decode(token).decode()


@contextlib.contextmanager
def load(
    cluster: Cluster, kind: str, name: str, folder: Path, ids: str = "sample", at_once: int = 8, *how: str
) -> Iterator[Load]:
    status = cluster.get(kind, name, training.NAMESPACE)["status"]
    results, stop = folder / f"{name}.jsonl", folder / f"{name}.stop"
    command = harness(
        "exec-net", sys.executable, str(LOAD), status["url"], str(results), str(stop), ids, str(at_once), *how
    )
    environment = {**os.environ, "TOKEN": token_of(cluster, name)}
    with subprocess.Popen(command, env=environment) as process:
        try:
            yield Load(results, stop, process)
        finally:
            stop.touch()
            process.terminate()


@pytest.fixture(scope="module")
def service(installed: Cluster) -> Iterator[Cluster]:
    if not installed.own:
        pytest.skip("submits from inside the network of the harness's cluster")
    shared = document(
        "RewardService",
        SERVICE,
        SCORER,
        files={"configMap": "reward-1"},
        reward={"workers": {"replicas": 2, **SLOTS}},
    )
    shared["spec"]["reward"]["gateway"] = {"replicas": 2}
    reference = {"name": "shared", "kind": "service", "service": {"name": SERVICE}}
    users = [document("RLJob", name, reference) for name in JOBS]
    done = installed.apply(code(1.0), code(2.0), *users, shared)  # the jobs wait for their service
    assert done.returncode == 0, done.stderr
    for kind, name in (("rws", SERVICE), *(("rlj", job) for job in JOBS)):
        installed.until(f"{name} ready", lambda kind=kind, name=name: is_ready(installed, kind, name), 300)  # type: ignore[misc]
    yield installed
    for kind in ("rlj", "rws"):
        installed.kubectl("--namespace", training.NAMESPACE, "delete", kind, "--all", check=False)


def is_ready(cluster: Cluster, kind: str, name: str) -> bool:
    return cluster.condition(kind, name, training.NAMESPACE, "Ready").get("status") == "True"


def revision(cluster: Cluster, name: str = SERVICE) -> str:
    return str(cluster.get("rws", name, training.NAMESPACE)["status"]["revision"])


def gateways(cluster: Cluster) -> set[str]:
    """Return the uids of the gateways' pods, also of those that are about to end."""
    labels = f"plaudit.dev/job={SERVICE},plaudit.dev/role=gateway"
    return {pod["metadata"]["uid"] for pod in cluster.pods(training.NAMESPACE, labels)}


def change(cluster: Cluster, spec: dict[str, Any]) -> None:
    patch = json.dumps({"spec": spec})
    cluster.kubectl("--namespace", training.NAMESPACE, "patch", "rws", SERVICE, "--type", "merge", "-p", patch)


def test_a_changed_scorer_loses_and_repeats_nothing_and_every_result_has_its_version(service: Cluster, tmp_path: Path):
    before = revision(service)
    with contextlib.ExitStack() as stack:
        direct = stack.enter_context(load(service, "rws", SERVICE, tmp_path))
        users = [stack.enter_context(load(service, "rlj", job, tmp_path)) for job in JOBS]
        loads = [direct, *users]
        service.until("results", lambda: all(len(each.scored()) > 50 for each in loads))
        change(service, {"files": {"configMap": "reward-2"}})
        service.until("another revision", lambda: revision(service) != before)
        after = revision(service)
        service.until("rolled out", lambda: is_rolled_out(service))
        old = {id(each): len(each.scored()) for each in loads}
        service.until("results after", lambda: all(len(each.scored()) > old[id(each)] + 50 for each in loads))
        results = [each.end() for each in loads]
    for found in results:
        ids = Counter(result["id"] for result in found)
        assert set(ids) == {f"sample-{number}" for number in range(len(ids))}
        assert set(ids.values()) == {1}
        assert {result["outcome"] for result in found} == {"scored"}
        assert {result["score"] for result in found} == {1.0, 2.0}
    assert {(result["version"], result["score"]) for result in results[0]} == {(before, 1.0), (after, 2.0)}
    submitted = sum(map(len, results))
    service.until("metrics", lambda: scored(service) >= submitted)
    assert scored(service) == submitted
    assert is_ready(service, "rws", SERVICE)


def test_two_rolls_of_the_gateways_refuse_no_call_of_a_client_that_repeats_none(service: Cluster, tmp_path: Path):
    first = gateways(service)
    with load(service, "rws", SERVICE, tmp_path, "once", 16, "once") as direct:
        service.until("results", lambda: len(direct.scored()) > 50)
        for limit in (900_000, 800_000):
            before = gateways(service)
            change(service, {"reward": {"gateway": {"samplesPerMinute": limit}}})
            service.until("other gateways", lambda before=before: len(gateways(service) - before) == 2)  # type: ignore[misc]
            service.until("rolled out", lambda: is_rolled_out(service))
        service.until("the end of those before", lambda: len(gateways(service)) == 2)
        assert not first & gateways(service)
        old = len(direct.scored())
        service.until("results after", lambda: len(direct.scored()) > old + 50)
        results = direct.end()
    assert [result for result in results if "refused" in result] == []
    assert {result["outcome"] for result in results} == {"scored"}


def test_a_canary_is_compared_before_it_counts_and_promoted_without_a_loss(service: Cluster, tmp_path: Path):
    follower = document("RewardService", NEXT, SCORER, files={"configMap": "reward-3"}, reward={"workers": SLOTS})
    done = service.apply(code(3.0), follower)
    assert done.returncode == 0, done.stderr
    service.until("the canary", lambda: is_ready(service, "rws", NEXT), 300)
    before, canary = revision(service), revision(service, NEXT)
    with load(service, "rws", SERVICE, tmp_path, ids="later") as direct:
        change(service, {"reward": {"gateway": {"canary": {"service": {"name": NEXT}, "share": 0.5}}}})
        # As it was found: the next request may reach a gateway that has compared nothing yet.
        seen = service.until("a comparison", lambda: compared_at_least(service, 21))
        num_compared = len(direct.scored())
        assert seen["agreement"] == 0.0
        assert seen["versions"] == [canary]
        assert seen["mean_difference"] == pytest.approx(3.0 - direct.scored()[-1]["score"])
        change(service, {"files": {"configMap": "reward-3"}, "reward": {"gateway": {"canary": None}}})
        service.until("promotion", lambda: revision(service) == canary)
        service.until("rolled out", lambda: is_rolled_out(service))
        old = len(direct.scored())
        service.until("results after", lambda: len(direct.scored()) > old + 50)
        results = direct.end()
    assert {result["version"] for result in results[:num_compared]} == {before}, "the canary never answers"
    assert {result["version"] for result in results} == {before, canary}
    assert sorted(int(result["id"].removeprefix("later-")) for result in results) == list(range(len(results)))
    assert {result["outcome"] for result in results} == {"scored"}


def test_two_jobs_get_equal_shares_however_many_samples_each_has_in_flight(service: Cluster, tmp_path: Path):
    with contextlib.ExitStack() as stack:
        loads = [
            stack.enter_context(load(service, "rlj", job, tmp_path, ids="share", at_once=at_once))
            for job, at_once in zip(JOBS, (128, 16), strict=True)
        ]
        service.until("results", lambda: all(len(each.scored()) > 100 for each in loads))
        before = [len(each.scored()) for each in loads]
        service.until("hundreds more", lambda: sum(len(each.scored()) for each in loads) > sum(before) + 400)
        large, small = (len(each.scored()) - old for each, old in zip(loads, before, strict=True))
        results = [each.end() for each in loads]
    for found in results:
        assert {result["outcome"] for result in found} == {"scored"}
        assert sorted(int(result["id"].removeprefix("share-")) for result in found) == list(range(len(found)))
    assert small / (small + large) > 0.3, "in order of arrival it would get 16 of 144"


def is_rolled_out(cluster: Cluster) -> bool:
    return cluster.condition("rws", SERVICE, training.NAMESPACE, "RolledOut").get("status") == "True"


def compared(cluster: Cluster) -> dict[str, Any]:
    """The comparison of the gateway that answers; empty while it has none."""
    with contextlib.suppress(ValueError):
        authorization = f"authorization: Bearer {token_of(cluster, SERVICE)}"
        url = f"{cluster.get('rws', SERVICE, training.NAMESPACE)['status']['url']}/v1/service"
        found: dict[str, Any] = json.loads(fetched(url, "-H", authorization)).get("canary", {})
        return found
    return {}


def compared_at_least(cluster: Cluster, num_different: int) -> dict[str, Any]:
    """The comparison of the gateway that answers; empty until so many samples differed."""
    found = compared(cluster)
    return found if found.get("samples", {}).get("different", 0) >= num_different else {}


def fetched(url: str, *options: str) -> str:
    curl = harness("exec-net", "curl", "-s", *options, url)
    return subprocess.run(curl, capture_output=True, text=True, check=False).stdout


def scored(cluster: Cluster) -> int:
    """The samples that the service has scored, by its metrics."""
    page = fetched(f"http://{SERVICE}-metrics.{training.NAMESPACE}.svc:9090/metrics")
    outcomes: Mapping[str, str] = dict(re.findall(r'^plaudit_samples_total\{outcome="(\w+)"\} ([\d.e+]+)', page, re.M))
    return round(sum(float(count) for count in outcomes.values()))
