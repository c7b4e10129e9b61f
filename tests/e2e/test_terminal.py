"""Agents with machines: a model that learns commands, and processes that are killed while machines are in use."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from container_images import IMAGE, why_none
from namespaces import HAS_NAMESPACES
from plaudit_job.spec.rljob import SandboxesSpec
from plaudit_reward.providers import ContainerProvider, provider_of
from plaudit_sandbox.container_engine import find_engine
from plaudit_workers.cli import main
from waiting import until_in_thread

pytestmark = [
    pytest.mark.timeout(420),
    pytest.mark.skipif(not HAS_NAMESPACES, reason="this kernel makes no namespaces for us"),
]
WITHIN_S = 300.0
TURNS = [
    '<tool_call>{"name": "bash", "arguments": {"command": "printf 1 >> code"}}</tool_call>',
    '<tool_call>{"name": "bash", "arguments": {"command": "printf 2 >> code"}}</tool_call>',
    "1",
]


def machines_left(run: Path) -> list[Path]:
    return [*run.glob("*sandboxes*"), *run.glob(".*sandboxes*")]


def test_a_model_is_trained_by_tests_in_its_machines(
    example: Callable[[str], Path], plaudit_run: Callable[..., Any]
) -> None:
    run = plaudit_run(example("13-terminal") / "job.yaml", "--steps", "5")
    assert run.exit_code == 0, run.output
    assert run.trained_steps == [1, 2, 3, 4, 5]
    first, last = run.steps[0].statistics, run.steps[-1].statistics
    assert first["reward/mean"] < 0.15
    assert last["reward/mean"] > first["reward/mean"]
    for step in run.steps:
        assert step.statistics["reward_pipeline/outcome/scored"] == step.num_samples
        assert step.statistics["reward_pipeline/scorer/tests/extra/verify_s/mean"] > 0
    assert machines_left(run.folder) == []


@pytest.mark.skipif(bool(why_none()), reason=why_none())
def test_machines_of_a_run_may_be_containers(
    example: Callable[[str], Path], change_job: Callable[..., Path], plaudit_run: Callable[..., Any], tmp_path: Path
) -> None:
    folder = shutil.copytree(example("13-terminal"), tmp_path / "job")
    job = change_job(
        folder / "job.yaml",
        algorithm__steps=2,
        algorithm__promptsPerStep=1,
        algorithm__samplesPerPrompt=2,
        rollout__engine={"kind": "scripted", "arguments": {"turns": TURNS}},
        rollout__agent__maxTurnTokens=None,
        sandboxes={"provider": "container", "image": IMAGE, "maxConcurrent": 2, "memory": "256Mi", "disk": "64Mi"},
    )
    run = plaudit_run(job)
    assert run.exit_code == 0, run.output
    assert run.trained_steps == [1, 2]
    for step in run.steps:
        figures = step.statistics
        assert figures["reward_pipeline/outcome/scored"] == step.num_samples == 2
        sandbox = {key.rpartition("sandbox/")[2]: value for key, value in figures.items() if "/sandbox/" in key}
        assert (sandbox["machines"], sandbox["failed"]) == (2, 0)
        assert min(sandbox[f"{stage}_s/p50"] for stage in ("start", "exec", "verify")) > 0
        assert sandbox["cpu_hours"] > 0
    assert run.steps[1].statistics["reward_pipeline/sandbox/release_s/max"] > 0
    rows = [
        row for file in run.folder.glob("samples/*.parquet") for row in pyarrow.parquet.read_table(file).to_pylist()
    ]
    assert all(row["score"] == score_of(row) for row in rows)
    assert all(json.loads(row["sandbox_json"])["cpus"] == 1.0 for row in rows)
    assert machines_left(run.folder) == []
    provider = provider_of(SandboxesSpec(provider="container"), run.folder)
    assert isinstance(provider, ContainerProvider)
    assert find_engine().remove_of(provider.run) == []


@pytest.mark.skipif(bool(why_none()), reason=why_none())
def test_samples_of_tasks_with_images_work_in_containers_of_these(
    example: Callable[[str], Path], change_job: Callable[..., Path], plaudit_run: Callable[..., Any]
) -> None:
    folder = example("14-harbor")
    assert main(["images-of", str(folder / "problems")]) == 0
    solution = (folder / "problems" / "mend-mean" / "solution" / "solve.sh").read_text().strip()
    call = {"name": "bash", "arguments": {"command": solution}}
    job = change_job(
        folder / "job.yaml",
        algorithm__steps=1,
        algorithm__samplesPerPrompt=2,
        rollout__engine={
            "kind": "scripted",
            "arguments": {"turns": [f"<tool_call>{json.dumps(call)}</tool_call>", "="]},
        },
        rollout__agent__maxTurnTokens=None,
    )
    run = plaudit_run(job)
    assert run.exit_code == 0, run.output
    rows = [
        row for file in run.folder.glob("samples/*.parquet") for row in pyarrow.parquet.read_table(file).to_pylist()
    ]
    assert len(rows) == 3 * 2
    for row in rows:
        task = json.loads(row["extra_info_json"])["task"].rpartition("/")[2]
        assert (row["outcome"], row["score"]) == ("scored", float(task == "mend-mean")), row
    assert machines_left(run.folder) == []


def score_of(row: dict[str, Any]) -> float:
    """Return what the tests give for TURNS."""
    wanted = json.loads(row["extra_info_json"])["task"].rpartition("-")[2]
    return 1.0 if wanted == "12" else 0.3 if wanted[0] == "1" else 0.0


def test_kills_during_commands_and_tests_lose_no_sample_and_leave_no_machine(
    example: Callable[[str], Path],
    change_job: Callable[..., Path],
    plaudit_command: Callable[..., list[str]],
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(example("13-terminal"), tmp_path / "job")
    for test in folder.glob("tasks/*/tests/test.sh"):
        test.write_text(f"sleep 0.5\n{test.read_text()}")
    arguments = {"latencySeconds": {"kind": "constant", "value": 0.3}, "turns": TURNS}
    job = change_job(
        folder / "job.yaml",
        algorithm__steps=2,
        algorithm__promptsPerStep=6,
        algorithm__samplesPerPrompt=4,
        rollout__engine={"kind": "scripted", "arguments": arguments},
        rollout__agent__maxTurnTokens=None,
        lifecycle={"failurePolicy": {"maxRestarts": 20}},
    )
    run, log = tmp_path / "run", tmp_path / "output"
    with log.open("w") as output:
        running = subprocess.Popen(plaudit_command(job), stdout=output, stderr=output, text=True, cwd=tmp_path)
        try:
            for role, in_use in (("reward-0", "*/.*-verify-*"), ("rollout-0", "*/[0-9]*")):
                asyncio.run(until_in_thread(lambda in_use=in_use: list((run / "sandboxes").glob(in_use)), WITHIN_S))
                os.kill(int((run / "logs" / f"{role}.pid").read_text()), signal.SIGKILL)
            code = running.wait(timeout=WITHIN_S)
        finally:
            running.kill()
    assert code == 0, log.read_text()
    ledger = json.loads((run / "ledger.json").read_text())
    assert (ledger["problems"], ledger["duplicates"], ledger["open"]) == ([], 0, 0)
    rows = [row for file in (run / "samples").glob("*.parquet") for row in pyarrow.parquet.read_table(file).to_pylist()]
    assert len(rows) == 2 * 6 * 4
    for row in rows:
        assert (row["outcome"], row["score"]) == ("scored", score_of(row))
    assert machines_left(run) == []
