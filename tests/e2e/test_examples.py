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


BREAKING_TOOL = """
import os, signal
from pathlib import Path

from safe import Safe

COUNT = Path(__file__).with_name("calls")


class BreakingSafe(Safe):
    async def execute(self, instance_id, parameters, **kwargs):
        with COUNT.open("ab") as file:
            file.write(b".")
        if COUNT.stat().st_size > 60 and COUNT.stat().st_size % 4 == 0:
            os.kill(os.getpid(), signal.SIGSEGV)
        return await super().execute(instance_id, parameters, **kwargs)
"""


def test_a_tool_that_breaks_in_mid_run_costs_scores_but_not_the_run(
    example: Callable[[str], Path], change_job: Callable[..., Path], plaudit_run: Callable[..., Any]
) -> None:
    folder = example("08-tools")
    (folder / "breaking.py").write_text(BREAKING_TOOL)
    (folder / "breaking.yaml").write_text(
        (folder / "tools.yaml").read_text().replace("safe.Safe", "breaking.BreakingSafe")
    )
    call = '<tool_call>{"name": "open_safe", "arguments": {}}</tool_call>'
    arguments = {"latencySeconds": {"kind": "constant", "value": 0.01}, "turns": [call, "3"]}
    agent = {"kind": "tools", "maxTurns": 2, "onToolFailure": "fail", "tools": [{"config": "breaking.yaml"}]}
    job = change_job(
        folder / "job.yaml",
        rollout__engine={"kind": "scripted", "arguments": arguments},
        rollout__agent=agent,
        rollout__sampling={"maxTokens": 40},
        algorithm__promptsPerStep=4,
        algorithm__samplesPerPrompt=8,
    )
    run = plaudit_run(job, "--steps", "4")
    assert run.exit_code == 0, run.output
    assert run.trained_steps[0] == 1
    statistics = [step.statistics for step in run.steps]
    assert statistics[0]["reward_pipeline/outcome/scored"] == 32
    assert sum(each.get("reward_pipeline/outcome/infra_error", 0) for each in statistics) > 0
    assert run.trained_steps == [1, 2, 3, 4]
    # The policy of this test answers 3: a failed call that became a zero would lower the mean of what was scored.
    for step in run.steps:
        outcomes = ("scored", "infra_error")
        assert sum(step.statistics.get(f"reward_pipeline/outcome/{name}", 0) for name in outcomes) == step.num_samples
        assert step.statistics["reward/min"] >= 0.1 - 1e-6


def test_an_environment_of_trl_runs_unchanged(
    example: Callable[[str], Path],
    change_job: Callable[..., Path],
    plaudit_run: Callable[..., Any],
) -> None:
    call = '<tool_call>{"name": "press", "arguments": {"button": 3}}</tool_call>'
    arguments = {"latencySeconds": {"kind": "constant", "value": 0.01}, "turns": [call, "1"]}
    engine = {"kind": "scripted", "arguments": arguments}
    job = change_job(example("09-environment") / "job.yaml", rollout__engine=engine, rollout__agent__maxTurnTokens=None)
    run = plaudit_run(job, "--steps", "2")
    assert run.exit_code == 0, run.output
    assert run.trained_steps == [1, 2]
    for step in run.steps:
        assert step.statistics["reward_pipeline/outcome/scored"] == step.num_samples
        # The button is right in one of five rows, and every call gets 0.1 at least.
        assert 0.1 <= step.statistics["reward_pipeline/scorer/lamp/value/mean"] <= 1


def test_a_model_calls_a_tool_and_is_trained_on_its_own_turns_only(
    example: Callable[[str], Path], plaudit_run: Callable[..., Any]
) -> None:
    run = plaudit_run(example("08-tools") / "job.yaml", "--steps", "6")
    assert run.exit_code == 0, run.output
    assert run.trained_steps == [1, 2, 3, 4, 5, 6]
    first, last = run.steps[0].statistics, run.steps[-1].statistics
    assert first["reward/mean"] < 0.1
    assert last["num_turns/mean"] > first["num_turns/mean"]
    assert last["reward/mean"] > first["reward/mean"]
