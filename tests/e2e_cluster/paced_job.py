"""A job that trains in pods for as long as a test needs, for tests that inject faults.

The rollouts' engine is scripted, so that they start in a second; everything else is real, including the trainer. While
the file ``slow-<job>`` exists on the shared volume, each score takes seconds; without it, steps close quickly: while a
test waits for one, and at the end. So a job ends soon after the last fault, however long the faults took. The slower
the scores, the fewer steps it needs for the same time; a reward worker that is drained hands them back after 20 s.
"""

from __future__ import annotations

import json
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import training
from real_cluster import Cluster

from plaudit_metrics.sources.steps import read_steps

NAMESPACE = training.NAMESPACE
PROMPTS, SAMPLES = 4, 4
_ROLES = {"rollout": 2, "reward": 2, "trainer": 1, "transport": 1, "metrics": 1}
REWARD = """\
import asyncio, pathlib

async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    for _ in range({slow_s} * 5):
        if not pathlib.Path("/plaudit/slow-{name}").exists():
            break
        await asyncio.sleep(0.2)
    return sum(int(token) < 8 for token in solution_str.split()) / 6
"""


class PacedJob:
    """One such job.

    Args:
        cluster: a cluster on this machine, with the chart and ``training.prepare``'s volumes.
        name: name of the job.
        steps: number of steps.
        reward: the module of its reward function, with ``{name}`` in place of the job's name.
        slow_s: for how long a slow score takes, in place of ``{slow_s}`` there.
    """

    def __init__(self, cluster: Cluster, name: str, steps: int, reward: str = REWARD, slow_s: int = 6) -> None:
        self.cluster = cluster
        self._reward = reward.format(name=name, slow_s=slow_s)
        self.name = name
        self.steps = steps
        claim = cluster.get("pvc", "shared", NAMESPACE)
        volume = cluster.get("pv", claim["spec"]["volumeName"])
        self._shared = Path(volume["spec"]["local"]["path"])
        self._slow = self._shared / f"slow-{name}"

    def start(self, manifest: dict[str, Any] | None = None) -> None:
        """Apply the job with slow scores, and wait until it trains."""
        self._slow.touch()
        files = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": self.name, "namespace": NAMESPACE}}
        reward = {**files, "data": {"reward.py": self._reward}}
        done = self.cluster.apply(reward, manifest or self.manifest())
        assert done.returncode == 0, done.stderr
        try:
            self.cluster.until("the run's id", lambda: self.status.get("run"))
            self.goes_on()
        except BaseException:  # what nobody waits for any more would slow the tests after it
            self.delete()
            raise

    def manifest(self) -> dict[str, Any]:
        """Return the RLJob."""
        job = training.copy_digits(self.steps, self.name)
        spec = job["spec"]
        spec["algorithm"] |= {"promptsPerStep": PROMPTS, "samplesPerPrompt": SAMPLES}
        spec["algorithm"] |= {"maxStaleness": 1, "miniBatchesPerStep": 2}
        latency = {"kind": "uniform", "low": 0.02, "high": 0.1}
        script = {"latencySeconds": latency, "responseTokens": {"kind": "constant", "value": 6}, "vocabularySize": 16}
        spec["rollout"] |= {"replicas": 2, "engine": {"kind": "scripted", "arguments": script}, "pod": {}}
        spec["reward"]["workers"]["replicas"] = 2
        spec["reward"]["timeoutSeconds"] = 60
        spec["trainer"]["checkpoint"]["everySteps"] = 3
        spec["trainer"]["pod"] |= {"affinity": {"podAntiAffinity": _away_from("redis")}}
        spec["files"] = {"configMap": self.name}
        spec["lifecycle"] = {"failurePolicy": {"maxRestarts": 20}}
        return job

    @property
    def status(self) -> dict[str, Any]:
        """Return the status of the RLJob."""
        found: dict[str, Any] = self.cluster.get("rlj", self.name, NAMESPACE).get("status", {})
        return found

    @property
    def phase(self) -> str:
        """Return the phase."""
        return str(self.status.get("phase", ""))

    def condition(self, kind: str) -> dict[str, Any]:
        """Return a condition; empty if it is missing."""
        return self.cluster.condition("rlj", self.name, NAMESPACE, kind)

    def pods(self, *roles: str) -> list[dict[str, Any]]:
        """Return its pods, of these roles or of all."""
        labels = f"plaudit.dev/job={self.name}" + (f",plaudit.dev/role in ({','.join(roles)})" if roles else "")
        return self.cluster.pods(NAMESPACE, labels)

    @cached_property
    def folder(self) -> Path:
        """Return the path of the run's folder on this machine."""
        return self._shared / "runs" / NAMESPACE / str(self.status["run"])

    @property
    def lines(self) -> int:
        """Return the number of steps closed so far; a repeated step counts each time."""
        file = self.folder / "steps.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def goes_on(self, seconds: float = 600, rollouts: int = _ROLES["rollout"]) -> float:
        """Wait until all of it runs and one more step is closed; return the seconds waited."""
        began = time.monotonic()
        self.cluster.until(f"all of {self.name} runs", lambda: self._all_there(rollouts), seconds)
        lines = self.lines
        self._slow.unlink()
        try:
            self.cluster.until("another step", lambda: self.lines > lines, seconds)
        finally:
            self._slow.touch()
        return time.monotonic() - began

    def _all_there(self, rollouts: int) -> bool:
        status = self.status
        assert status.get("phase") not in ("Complete", "Failed"), status["conditions"]
        wanted = _ROLES | {"rollout": rollouts}
        roles = {role["name"]: role for role in status.get("roles", [])}
        there = all(roles.get(name, {}).get("ready") == count for name, count in wanted.items())
        return bool(there and status["phase"] == "Running")

    def finish(self, seconds: float = 600) -> dict[str, Any]:
        """Make scores fast and wait until the job ends; return its final status."""
        self._slow.unlink(missing_ok=True)
        self.cluster.until("the end", lambda: self.phase in ("Complete", "Failed"), seconds)
        return self.status

    def ledger(self) -> dict[str, Any]:
        """Return the ledger: the outcome of each group."""
        found: dict[str, Any] = json.loads((self.folder / "ledger.json").read_text())
        return found

    def trained_samples(self) -> list[tuple[int, int]]:
        """Return data position and index of each sample trained on in the surviving line of checkpoints, sorted."""
        found = []
        for record in read_steps(self.folder / "steps.jsonl"):
            file = self.folder / "samples" / f"step-{record.step:06d}-i{record.incarnation}.parquet"
            rows = parquet.read_table(file, columns=["group", "index", "end"]).to_pylist()
            found += [(int(row["group"].split("-")[1]), row["index"]) for row in rows if row["end"] == "trained"]
        return sorted(found)

    def delete(self) -> None:
        """Delete the job and its inputs."""
        where = ("--namespace", NAMESPACE)
        self.cluster.kubectl(*where, "delete", f"rlj/{self.name}", f"configmap/{self.name}", check=False)


def _away_from(role: str) -> dict[str, Any]:
    """Return an affinity that prefers a node without that role."""
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"plaudit.dev/role": role}}}
    return {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}
