"""The example with a reward model, and what a killed server costs its samples."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.timeout(900)


def children(pid: int) -> list[int]:
    """Processes that a process started."""
    return [child.pid for child in psutil.Process(pid).children()]


def kill_engine(folder: Path) -> None:
    """SIGKILLs the first server's engine once the first step is closed."""
    while not (folder / "steps.jsonl").exists() or b"\n" not in (folder / "steps.jsonl").read_bytes():
        time.sleep(0.05)
    for child in children(int((folder / "logs" / "model-preference-0.pid").read_text())):
        os.kill(child, signal.SIGKILL)


def test_a_killed_server_costs_no_sample_its_score(
    example: Callable[[str], Path],
    change_job: Callable[..., Path],
    plaudit_run: Callable[..., Any],
    scripted: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Its servers free their memory during updates, which costs no score either."""
    job = change_job(
        example("05-reward-model") / "job.yaml",
        rollout__engine=scripted,
        reward__scorers__0__model__sleepDuringUpdates=True,
    )
    killer = threading.Thread(target=kill_engine, args=(tmp_path / "run",), daemon=True)
    killer.start()
    run = plaudit_run(job, "--steps", "6")
    assert run.exit_code == 0, run.output
    assert run.trained_steps == list(range(1, 7))
    assert "model-preference-0 1x" in run.output
    for step in run.steps:
        assert step.statistics["reward_pipeline/outcome/scored"] == step.num_samples == 128
        assert step.statistics["reward/min"] != 0
        assert step.statistics["timing_s/wait_for_gpus"] > 0
    for number in range(2):
        log = (run.folder / "logs" / f"model-preference-{number}.log").read_text()
        assert log.count("asleep") >= 3
        assert "awake" in log
    assert not list((run.folder / "model-servers" / "preference").glob("*.url"))  # they ended with the run
