"""Every example, shortened, as its reader would run it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)


def test_copy_digits_learns_and_goes_on_after_a_stop(
    example: Callable[[str], Path], plaudit_run: Callable[..., Any]
) -> None:
    job = example("01-copy-digits") / "job.yaml"
    first = plaudit_run(job, "--steps", "20", name="digits")
    assert first.exit_code == 0, first.output
    assert first.trained_steps == list(range(1, 21))
    first_incarnation = first.steps[-1].incarnation  # the same folder holds the resumed run's steps later
    resumed = plaudit_run(job, "--steps", "40", "--resume", name="digits")
    assert resumed.exit_code == 0, resumed.output
    assert resumed.trained_steps == list(range(1, 41))
    assert resumed.steps[-1].incarnation > first_incarnation
    assert resumed.mean_reward(last=5) > resumed.steps[0].statistics["reward/mean"] + 0.1
    ledger = resumed.ledger
    assert ledger["admitted"] == ledger["trained"] + ledger["evaluated"] + ledger["dropped"]
    assert len(list((resumed.folder / "samples").glob("*.parquet"))) >= 40


def test_a_verl_reward_file_runs_unchanged(example: Callable[[str], Path], plaudit_run: Callable[..., Any]) -> None:
    run = plaudit_run(example("02-verl-reward") / "job.yaml", "--steps", "3")
    assert run.exit_code == 0, run.output
    assert run.trained_steps == [1, 2, 3]
    for step in run.steps:
        assert step.statistics["reward_pipeline/outcome/scored"] == step.num_samples


def test_slow_rewards_are_seen_in_the_verdict(example: Callable[[str], Path], plaudit_run: Callable[..., Any]) -> None:
    run = plaudit_run(example("03-slow-rewards") / "job.yaml", "--steps", "4")
    assert run.exit_code == 0, run.output
    assert {step.verdict for step in run.steps} & {"reward", "straggler"}
    lines = [json.loads(line) for line in run.output.splitlines() if line.startswith('{"step"')]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["exposed reward s"] > 0 for line in lines)


def test_trl_reward_functions_run_unchanged(example: Callable[[str], Path], plaudit_run: Callable[..., Any]) -> None:
    run = plaudit_run(example("06-trl-reward") / "job.yaml", "--steps", "2")
    assert run.exit_code == 0, run.output
    assert run.trained_steps == [1, 2]
    for step in run.steps:
        assert step.statistics["reward_pipeline/outcome/scored"] == step.num_samples
        assert step.statistics["reward/mean"] == pytest.approx(0.0, abs=1e-3)  # normalised within each group
        assert 0 < step.statistics["reward_pipeline/scorer/brevity/value/mean"] <= 1
