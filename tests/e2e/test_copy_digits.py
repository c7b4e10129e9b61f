"""The first example as its reader would run it: Ctrl-C leaves a checkpoint and no process, ``--resume`` learns on."""

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from waiting import runs

pytestmark = pytest.mark.timeout(900)


def interrupted(command: list[str], run: Path, after_steps: int) -> None:
    """Starts the run and sends Ctrl-C after so many steps: it ends with a checkpoint and leaves no process behind."""
    output = run.with_suffix(".output")
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
        while process.poll() is None and len(list((run / "samples").glob("step-*"))) < after_steps:
            time.sleep(0.05)
        pids = [int(file.read_text()) for file in [*(run / "logs").glob("*.pid"), run / "redis" / "redis.pid"]]
        process.send_signal(signal.SIGINT)
        code = process.wait(300)
    assert code == 130, output.read_text()
    assert "--resume" in output.read_text()
    assert len(pids) == 5
    deadline = time.monotonic() + 30
    while any(runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if runs(pid)]
    assert list((run / "checkpoints").glob("step-*"))


def test_copy_digits_stops_at_ctrl_c_goes_on_and_learns(
    example: Callable[[str], Path],
    plaudit_run: Callable[..., Any],
    plaudit_command: Callable[..., list[str]],
    tmp_path: Path,
) -> None:
    job = example("01-copy-digits") / "job.yaml"
    interrupted(plaudit_command(job, "--steps", "40", name="digits"), tmp_path / "digits", after_steps=10)
    run = plaudit_run(job, "--steps", "40", "--resume", name="digits")
    assert run.exit_code == 0, run.output
    assert run.trained_steps == list(range(1, 41))
    assert run.steps[-1].incarnation > run.steps[0].incarnation
    assert run.mean_reward(last=5) > run.steps[0].statistics["reward/mean"] + 0.1
    ledger = run.ledger
    assert ledger["admitted"] == ledger["trained"] + ledger["evaluated"] + ledger["dropped"]
    assert len(list((run.folder / "samples").glob("*.parquet"))) >= 40


def test_rollouts_that_sleep_during_updates_continue_with_the_new_weights_on_ray(
    example: Callable[[str], Path], plaudit_run: Callable[..., Any], change_job: Callable[..., Path], ray_cluster: str
) -> None:
    job = change_job(example("01-copy-digits") / "job.yaml", rollout__sleepDuringUpdates=True)
    run = plaudit_run(job, "--steps", "5", "--address", ray_cluster)
    assert run.exit_code == 0, run.output
    assert run.trained_steps == list(range(1, 6))
    for step in run.steps:
        assert step.statistics["timing_s/wait_for_gpus"] > 0
        assert step.statistics["actor/logprob_mismatch"] < 1e-4
        assert step.statistics["reward_pipeline/staleness/max"] == 0
