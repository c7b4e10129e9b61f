"""Ctrl-C: the run ends with a checkpoint and leaves no process behind."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.timeout(900)
def test_an_interrupted_run_checkpoints_and_leaves_nothing_running(
    example: Callable[[str], Path], ray_cluster: str, tmp_path: Path
) -> None:
    job = example("01-copy-digits") / "job.yaml"
    command = [sys.executable, "-m", "plaudit_workers.cli", "run", str(job), "--address", ray_cluster]
    run = tmp_path / "run"
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            [*command, "--runs-folder", str(tmp_path), "--run", "run"], stdout=output, stderr=output
        )
        while process.poll() is None and len(list((run / "samples").glob("step-*"))) < 4:
            time.sleep(0.1)
        pids = [int(file.read_text()) for file in [*(run / "logs").glob("*.pid"), run / "redis" / "redis.pid"]]
        process.send_signal(signal.SIGINT)
        code = process.wait(300)
    printed = (tmp_path / "output").read_text()
    assert code == 130, printed
    assert "--resume" in printed
    assert len(pids) == 5
    for _ in range(100):
        if not any(alive(pid) for pid in pids):
            break
        time.sleep(0.1)
    assert not [pid for pid in pids if alive(pid)]
    assert list((run / "checkpoints").glob("step-*"))
