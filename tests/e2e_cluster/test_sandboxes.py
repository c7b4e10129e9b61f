"""Whole jobs whose samples work in pods: right rewards through a killed broker and a suspension, and nothing left.

The agents of the first job are tools, those of the second are programs in the pods. They begin together: one works
while the other one waits.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import agent_sandbox
import images
import pyarrow.parquet as parquet
import pytest
import training
from paced_job import NAMESPACE, PacedJob
from pod_processes import main_process
from real_cluster import ROOT, Cluster
from ruamel.yaml import YAML

from plaudit_job.processes import machines_run
from plaudit_reward.machines import KEPT, KeptMachines
from plaudit_reward.pod_provider import RUN_LABEL, PodProvider
from plaudit_reward.providers import MachineChoice
from plaudit_reward.scorer import Attempt, Score
from plaudit_reward.verifier import VerifierScorer
from plaudit_sandbox.pod_manifests import LABEL
from plaudit_wire.records import Sample

pytestmark = pytest.mark.timeout(1200)

EXAMPLE = ROOT / "examples" / "13-terminal"
STEPS, PROMPTS, SAMPLES = 2, 5, 2
REWARDS = {"01": 1.0, "00": 0.3, "02": 0.3}
"""By the digits that a task wants; the script of all samples writes 01."""
SMALL = '[environment]\ncpus = 0.1\nmemory_mb = 64\nstorage_mb = 32\nworkdir = "/app"\n'


PROGRAM = """
import json, os, socket, sys, time, urllib.error, urllib.request
from urllib.parse import urlsplit

url, messages = os.environ["OPENAI_BASE_URL"], json.load(sys.stdin)["messages"]


def ask(key=os.environ["OPENAI_API_KEY"]):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    headers = {"authorization": "Bearer " + key, "content-type": "application/json"}
    while True:
        try:
            answer = urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, headers))
            return json.load(answer)["choices"][0]["message"]["content"]
        except ConnectionResetError:  # until the rollout has seen that the connections below were closed
            time.sleep(0.1)


held = [socket.create_connection((urlsplit(url).hostname, urlsplit(url).port)) for _ in range(66)]
held[-1].settimeout(30)
try:
    assert held[-1].recv(1) == b""
except ConnectionResetError:
    pass
for each in held:
    each.close()
try:
    ask("sk-plaudit-of-another-sample")
except urllib.error.HTTPError as error:
    assert error.code == 401
else:
    sys.exit("a key of no sample was answered")
while (digit := ask()) != "=":
    with open("code", "a") as file:
        file.write(digit)
    messages += [{"role": "assistant", "content": digit}, {"role": "user", "content": digit}]
"""
"""Asks the policy for one digit after another, unless it gets what it must not get."""


@cache
def _prepare(folder: Path) -> None:
    """Write the model and the tasks, which both jobs read."""
    subprocess.run([sys.executable, EXAMPLE / "prepare.py", "--folder", folder], check=True)
    (folder / "model" / "model.safetensors").chmod(0o644)  # pods have another user
    for task in folder.glob("tasks/*/task.toml"):
        task.write_text(task.read_text().replace("[environment]\n", SMALL))


class TerminalJob(PacedJob):
    """The terminal example with pods for machines, and with a script for a policy."""

    def manifest(self) -> dict[str, Any]:
        _prepare(self._shared / "terminal")
        job: dict[str, Any] = YAML(typ="safe").load(EXAMPLE / "job.yaml")
        spec, inside = job["spec"], "/plaudit/terminal"
        job["metadata"] = {"name": self.name, "namespace": NAMESPACE}
        spec["model"]["source"] = f"{inside}/model"
        spec["data"]["train"]["tasks"] = f"{inside}/tasks"
        spec["algorithm"] |= {"steps": STEPS, "promptsPerStep": PROMPTS, "samplesPerPrompt": SAMPLES}
        turns = [_call(0), _call(1), "="]
        spec["rollout"] |= {
            "replicas": 2,
            "engine": {"kind": "scripted", "maxModelLength": 64, "arguments": {"turns": turns}},
            "pod": training.heavy(),
        }
        del spec["rollout"]["agent"]["maxTurnTokens"]  # the script ends its turns by a token of its own
        spec["sandboxes"] = {"provider": "pods", "image": images.MACHINE, "maxConcurrent": 12, "warm": 2}
        spec["sandboxes"]["keep"] = "all"
        spec["sandboxes"] |= {"memory": "64Mi", "disk": "32Mi"}
        spec["reward"] |= {"timeoutSeconds": 600, "workers": {"processes": 1, "replicas": 2}}
        spec["trainer"]["pod"] = training.heavy()
        spec["storage"] = {"claimName": "shared"}
        spec["lifecycle"] = {"cleanup": "None", "failurePolicy": {"maxRestarts": 20}}
        return job

    def suspend(self, value: bool) -> None:
        """Suspend the job, or resume it."""
        change = json.dumps({"spec": {"suspend": value}})
        self.cluster.kubectl("--namespace", NAMESPACE, "patch", f"rlj/{self.name}", "--type=merge", "--patch", change)

    def tested_again(self, row: dict[str, Any]) -> Score:
        """Return the score of a sample's machine that was kept, from outside of the cluster."""
        choice = MachineChoice(images.MACHINE, memory_bytes=64 << 20, disk_bytes=32 << 20)
        kept = KeptMachines(self.folder / KEPT, PodProvider(choice, namespace=NAMESPACE))
        given = json.loads(row["extra_info_json"])
        given["task"] = str(self._shared / Path(given["task"]).relative_to("/plaudit"))
        sample = Sample(row["group"], row["index"], "", "", "", extra_info=given)
        return asyncio.run(VerifierScorer("tests", kept, 1).score(sample, Attempt(600.0)))

    def rows(self) -> list[dict[str, Any]]:
        """Return the samples that the run stored."""
        return [row for file in self.folder.glob("samples/*.parquet") for row in parquet.read_table(file).to_pylist()]

    def machines(self) -> list[dict[str, Any]]:
        """Return the pods of its machines and of their tests."""
        run = machines_run(Path("/plaudit/runs", NAMESPACE, self.status.get("run", "")))
        return self.cluster.pods(NAMESPACE, f"{LABEL},{RUN_LABEL}={run}")


class ProgramJob(TerminalJob):
    """The same tasks for a program that runs in the pods."""

    def manifest(self) -> dict[str, Any]:
        job = super().manifest()
        spec = job["spec"]
        agent = {"kind": "endpoint", "command": ["python3", "-c", PROGRAM], "sandbox": True, "maxTurns": 3}
        spec["rollout"] |= {"replicas": 1, "agent": agent}
        spec["rollout"]["engine"]["arguments"] = {"turns": ["0", "1", "="]}
        spec["algorithm"]["steps"] = 1
        spec["sandboxes"] |= {"maxConcurrent": 4, "warm": 0, "keep": "none"}
        return job


class ClaimsJob(TerminalJob):
    """The same with machines that Agent Sandbox makes."""

    def manifest(self) -> dict[str, Any]:
        job = super().manifest()
        job["spec"]["algorithm"]["steps"] = 1
        job["spec"]["sandboxes"] |= {"provider": "agentSandbox", "keep": "none"}
        return job


def _is_ready(pods: list[dict[str, Any]]) -> bool:
    """Tell whether a pod's process was started again, and serves."""
    states = [state for pod in pods for state in pod["status"].get("containerStatuses", [])]
    return any(state["restartCount"] and state["ready"] for state in states)


def _call(digit: int) -> str:
    arguments = f'{{"command": "printf {digit} >> code"}}'
    return f'<tool_call>{{"name": "bash", "arguments": {arguments}}}</tool_call>'


def _begun(job: TerminalJob) -> None:
    done = job.cluster.apply(job.manifest())
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def programs(shared: Cluster) -> Iterator[Future[ProgramJob]]:
    """Yield the end of the second job."""
    if not shared.own:
        pytest.skip("kills processes of this machine, and needs an image")
    job = ProgramJob(shared, "programs", 1)
    _begun(job)
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(_ended, job)
    job.delete()


def _ended(job: ProgramJob) -> ProgramJob:
    """Return the second job at its end, in which its network policy has opened the pods of machines to its agents."""
    cluster = job.cluster
    cluster.until("machines", job.machines, 400)
    policy = cluster.get("networkpolicy", "programs-machines", NAMESPACE)
    opened = ",".join(f"{name}={value}" for name, value in policy["spec"]["podSelector"]["matchLabels"].items())
    cluster.until("agents that it opens", lambda: cluster.pods(NAMESPACE, opened), 60)
    cluster.until("the end", lambda: job.phase in ("Complete", "Failed", "Invalid"), 600)
    return job


@pytest.fixture(scope="module")
def job(shared: Cluster, programs: Future[ProgramJob]) -> Iterator[TerminalJob]:
    """Yield the first job, just begun."""
    job = TerminalJob(shared, "terminal", STEPS)
    _begun(job)
    yield job
    job.delete()


def test_samples_in_pods_get_the_rewards_of_their_tests_through_a_kill_and_a_suspension(job: TerminalJob) -> None:
    job.cluster.until("machines", lambda: len(job.machines()) >= 2, 400)
    (broker,) = job.pods("sandboxes")
    os.kill(main_process(broker), signal.SIGKILL)
    job.cluster.until("the next broker", lambda: _is_ready(job.pods("sandboxes")))
    job.cluster.until("its machines", job.machines)
    job.suspend(True)
    job.cluster.until("a suspended job without machines", lambda: not job.machines())
    job.cluster.until("the suspension", lambda: job.phase == "Suspended")
    assert not job.machines()
    job.suspend(False)
    job.cluster.until("the end", lambda: job.phase in ("Complete", "Failed", "Invalid"), 900)
    assert job.phase == "Complete", job.status["conditions"]
    ledger = job.ledger()
    # A group of which the kill took every sample is dropped.
    assert (ledger["trained"] + ledger["dropped"], ledger["problems"]) == (STEPS * PROMPTS, [])
    assert ledger["trained"] > STEPS * PROMPTS / 2
    rows = job.rows()
    assert len(rows) >= STEPS * PROMPTS * SAMPLES
    scored = [row for row in rows if row["outcome"] == "scored"]
    for row in scored:
        assert row["score"] == pytest.approx(REWARDS.get(row["prompt"].rstrip("=")[-2:], 0.0)), row["prompt"]
    # What the broker was doing when it was killed has no score, and is not counted as one.
    assert {row["outcome"] for row in rows} <= {"scored", "infra_error"}
    assert len(scored) > len(rows) / 2


def test_machines_that_were_kept_give_the_same_rewards_again(job: TerminalJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", job.cluster.kubeconfig)
    rows = job.rows()
    scored = [row for row in rows if row["outcome"] == "scored"]
    kept = {(path.parts[-3], int(path.parts[-2].split("-")[0])) for path in job.folder.glob(f"{KEPT}/*/*/kept.json")}
    found = [row for row in scored if (row["group"], row["index"]) in kept]
    assert len(found) > len(scored) / 2  # a suspension takes machines that were not kept yet
    for row in {row["score"]: row for row in found}.values():
        again = job.tested_again(row)
        assert again.outcome == "scored", again
        assert again.value == pytest.approx(row["score"]), row["prompt"]


def test_nothing_is_left_of_machines(job: TerminalJob) -> None:
    job.cluster.until("no machine is left", lambda: not job.machines())
    assert not [*job.folder.glob("machines/*")]
    assert not [*job.folder.glob("sandboxes/*")]


@pytest.mark.skipif(
    not os.environ.get("PLAUDIT_E2E_AGENT_SANDBOX"), reason="PLAUDIT_E2E_AGENT_SANDBOX names no controller"
)
def test_a_job_whose_machines_agent_sandbox_makes(shared: Cluster) -> None:
    with agent_sandbox.installed(shared, NAMESPACE):
        job = ClaimsJob(shared, "claims", 1)
        _begun(job)
        job.cluster.until("the end", lambda: job.phase in ("Complete", "Failed", "Invalid"), 900)
        assert job.phase == "Complete", job.status["conditions"]
        for row in job.rows():
            reward = REWARDS.get(row["prompt"].rstrip("=")[-2:], 0.0)
            assert row["score"] == pytest.approx(reward), row["reason"]
        for kind in agent_sandbox.KINDS:
            left = shared.kubectl("--namespace", NAMESPACE, "get", kind, "-o", "name").stdout
            assert not left, left
        job.delete()


def test_programs_in_pods_ask_their_rollout_for_the_policys_turns(programs: Future[ProgramJob]) -> None:
    job = programs.result()
    assert job.phase == "Complete", job.status["conditions"]
    rows = job.rows()
    assert len(rows) >= PROMPTS * SAMPLES
    for row in rows:
        reward = REWARDS.get(row["prompt"].rstrip("=")[-2:], 0.0)
        assert (row["outcome"], row["score"]) == ("scored", reward), row["reason"]
    job.cluster.until("no machine of any job is left", lambda: not job.cluster.pods(NAMESPACE, LABEL))
