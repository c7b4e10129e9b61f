"""Examples, shortened: the second as its reader would run it, the others, whose point is the reward, without vLLM."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)


def test_a_verl_reward_file_runs_unchanged(example: Callable[[str], Path], plaudit_run: Callable[..., Any]) -> None:
    run = plaudit_run(example("02-verl-reward") / "job.yaml", "--steps", "3")
    assert run.exit_code == 0, run.output
    assert run.trained_steps == [1, 2, 3]
    for step in run.steps:
        assert step.statistics["reward_pipeline/outcome/scored"] == step.num_samples


def test_slow_rewards_are_seen_in_the_verdict(
    example: Callable[[str], Path],
    change_job: Callable[..., Path],
    plaudit_run: Callable[..., Any],
    scripted: dict[str, Any],
) -> None:
    job = change_job(example("03-slow-rewards") / "job.yaml", rollout__engine=scripted)
    run = plaudit_run(job, "--steps", "4", "--json")
    assert run.exit_code == 0, run.output
    assert {step.verdict for step in run.steps} & {"reward", "straggler"}
    lines = [json.loads(line) for line in run.output.splitlines() if line.startswith("{")]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["exposed_reward_s"] > 0 for line in lines)


def test_trl_reward_functions_run_unchanged(
    example: Callable[[str], Path],
    change_job: Callable[..., Path],
    plaudit_run: Callable[..., Any],
    scripted: dict[str, Any],
) -> None:
    job = change_job(example("06-trl-reward") / "job.yaml", rollout__engine=scripted)
    run = plaudit_run(job, "--steps", "2")
    assert run.exit_code == 0, run.output
    assert run.trained_steps == [1, 2]
    for step in run.steps:
        assert step.statistics["reward_pipeline/outcome/scored"] == step.num_samples
        assert step.statistics["reward/mean"] == pytest.approx(0.0, abs=1e-3)  # normalised within each group
        assert 0 < step.statistics["reward_pipeline/scorer/brevity/value/mean"] <= 1
