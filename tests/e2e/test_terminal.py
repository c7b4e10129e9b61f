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

from namespaces import HAS_NAMESPACES
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
        task = json.loads(row["extra_info_json"])["task"]
        wanted = task.rpartition("-")[2]
        assert (row["outcome"], row["score"]) == ("scored", {"12": 1.0}.get(wanted, 0.3 if wanted[0] == "1" else 0.0))
    assert machines_left(run) == []
