"""Whole runs: ``plaudit run`` as its user starts it."""

import json
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from plaudit_metrics.sources.steps import read_steps
from plaudit_wire.records import StepRecord

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PLAUDIT = [sys.executable, "-m", "plaudit_workers.cli"]


@dataclass(frozen=True)
class FinishedRun:
    """What a run printed and left."""

    folder: Path
    exit_code: int
    output: str

    @property
    def steps(self) -> list[StepRecord]:
        """The steps that trained on something; step 0 is a validation."""
        return [record for record in read_steps(self.folder / "steps.jsonl") if record.num_samples]

    @property
    def trained_steps(self) -> list[int]:
        return [step.step for step in self.steps]

    @property
    def ledger(self) -> dict[str, Any]:
        ledger: dict[str, Any] = json.loads((self.folder / "ledger.json").read_text())
        return ledger

    def mean_reward(self, last: int = 10) -> float:
        rewards = [step.statistics["reward/mean"] for step in self.steps if "reward/mean" in step.statistics]
        return sum(rewards[-last:]) / len(rewards[-last:])


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Prepares a copy of an example once; returns its folder.

    A copy, since test processes side by side would write the same files while the other's run reads them. In this
    process, which then imports torch once for all of them.
    """
    examples = tmp_path_factory.mktemp("copy") / "examples"
    shutil.copytree(EXAMPLES, examples, ignore=shutil.ignore_patterns("data", "model", "tasks", "runs", "__pycache__"))
    prepared: set[str] = set()

    def prepare(name: str) -> Path:
        if name not in prepared:
            script = str(examples / name / "prepare.py")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "argv", [script])
                runpy.run_path(script, run_name="__main__")
            prepared.add(name)
        return examples / name

    return prepare


@pytest.fixture(scope="session")
def scripted() -> dict[str, Any]:
    """A rollout engine that starts at once, for what is not about vLLM; every response follows from the job's seed."""
    return {"kind": "scripted", "arguments": {"latencySeconds": {"kind": "constant", "value": 0.05}}}


@pytest.fixture
def change_job(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Writes a job file with some fields changed (``a__b`` is spec.a.b; None takes it out) beside the original."""
    written: list[Path] = []

    def change(job: Path, **fields: Any) -> Path:
        data = yaml.safe_load(job.read_text())
        for name, value in fields.items():
            *parents, last = name.split("__")
            section = data["spec"]
            for parent in parents:
                section = section[int(parent)] if parent.isdigit() else section.setdefault(parent, {})
            if value is None:
                section.pop(last, None)
            else:
                section[last] = value
        # Beside the original, since paths in a job are relative to it.
        changed = job.parent / f".{tmp_path.name}-{len(written)}.yaml"
        changed.write_text(yaml.safe_dump(data))
        written.append(changed)
        return changed

    yield change
    for file in written:
        file.unlink()


@pytest.fixture
def plaudit_command(tmp_path: Path) -> Callable[..., list[str]]:
    """The command that runs a job in this test's folder."""

    def command(job: Path, *arguments: str, name: str = "run") -> list[str]:
        return [*PLAUDIT, "run", str(job), "--runs-folder", str(tmp_path), "--run", name, *arguments]

    return command


@pytest.fixture
def plaudit_run(tmp_path: Path, plaudit_command: Callable[..., list[str]]) -> Callable[..., FinishedRun]:
    """Runs a job to its end."""

    def run(job: Path, *arguments: str, name: str = "run", timeout_s: float = 420) -> FinishedRun:
        command = plaudit_command(job, *arguments, name=name)
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=tmp_path)
        return FinishedRun(tmp_path / name, done.returncode, done.stdout + done.stderr)

    return run
