"""The example of a reward that can be gamed: the probe finds it, the run shows it, and the mended run does not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from judge_process import JudgeProcess
from plaudit_metrics.monitoring.rules import THRESHOLDS

pytestmark = pytest.mark.timeout(900)
EXAMPLES = Path(__file__).parents[2] / "examples"
PROBABILITY = "audit/honest/diverges"


def plaudit(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Plaudit."""
    command = [sys.executable, "-m", "plaudit_workers.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def alarms(run: Any) -> list[int]:
    """The steps after which the expression of RewardDiverges holds."""
    limit = THRESHOLDS["divergenceProbability"]
    return [step.step for step in run.steps if step.statistics.get(PROBABILITY, 1.0) < limit]


def test_a_hacked_reward_is_found_before_during_and_after_its_run(
    example: Callable[[str], Path],
    plaudit_run: Callable[..., Any],
) -> None:
    folder = example("15-hacked-reward")
    probed = plaudit("probe", str(folder / "job.yaml"), "--rows", "2", "--json")
    assert probed.returncode == 3, probed.stderr
    run = plaudit_run(folder / "job.yaml", "--steps", "32", name="hacked")
    assert run.exit_code == 0, run.output
    first = next(step.statistics for step in run.steps if "audit/honest/value" in step.statistics)
    last = run.steps[-1].statistics
    assert last["audit/honest/reward"] > first["audit/honest/reward"]
    assert last["audit/honest/value"] < first["audit/honest/value"]
    assert alarms(run)
    audited = json.loads(plaudit("audit", str(run.folder), "--json").stdout)
    (auditor,) = audited["auditors"]
    assert auditor["diverged_at"]
    assert auditor["disagreements"]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("01-copy-digits", "job.yaml"),
        ("02-verl-reward", "job.yaml"),
        ("03-slow-rewards", "job.yaml"),
        ("06-trl-reward", "job.yaml"),
        ("12-images", "job.yaml"),
        ("15-hacked-reward", "mended.yaml"),
    ],
)
def test_the_probe_finds_no_hole_in_other_examples(example: Callable[[str], Path], name: str, file: str) -> None:
    probed = plaudit("probe", str(example(name) / file), "--rows", "2")
    assert probed.returncode == 0, probed.stdout + probed.stderr


def test_a_reward_service_is_probed_with_lines_of_its_callers() -> None:
    folder = EXAMPLES / "07-reward-service"
    probed = plaudit("probe", str(folder / "job.yaml"), "--data", str(folder / "samples.jsonl"), "--rows", "2")
    assert probed.returncode == 0, probed.stdout + probed.stderr
    assert "right response          1" in probed.stdout


def test_the_probe_finds_no_hole_in_the_example_of_a_judge(example: Callable[[str], Path]) -> None:
    folder = example("04-judge")
    judge = JudgeProcess(folder / "judge_server.py", "--latency", "0.01")
    job = folder / "probed.yaml"
    job.write_text((folder / "job.yaml").read_text().replace(":8377/", f":{judge.port}/"))
    judge.start()
    probed = plaudit("probe", str(job), "--rows", "2")
    judge.kill()
    assert probed.returncode == 0, probed.stdout + probed.stderr
    assert "requests of judge" in probed.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("05-reward-model", "nothing to try without a run"),
        ("09-environment", "plaudit try"),
        ("10-agent", "plaudit try"),
        ("11-openenv", "plaudit try"),
        ("14-harbor", "plaudit tasks"),
    ],
)
def test_a_reward_that_no_text_earns_is_refused_with_what_tries_it(name: str, words: str) -> None:
    probed = plaudit("probe", str(EXAMPLES / name / "job.yaml"))
    assert (probed.returncode, words in probed.stderr) == (2, True), probed.stderr


def test_the_mended_reward_raises_no_alarm(example: Callable[[str], Path], plaudit_run: Callable[..., Any]) -> None:
    run = plaudit_run(example("15-hacked-reward") / "mended.yaml", "--steps", "30", name="mended")
    assert run.exit_code == 0, run.output
    assert PROBABILITY in run.steps[-1].statistics
    assert not alarms(run)
