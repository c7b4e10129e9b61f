"""examples/11-openenv with OpenEnv itself: its server is killed in mid-run, started again, and no zero is invented."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import yaml
from trainer_environments import CACHE, python

EXAMPLES = Path(__file__).parents[2] / "examples"
NAME = "11-openenv"
STEPS = 6
CALL = '<tool_call>{"name": "step", "arguments": {"button": 1}}</tool_call>'

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy and prepare the example, with OpenEnv where its README installs it, and with a scripted policy."""
    if python("openenv") is None:
        pytest.skip(f"the environment openenv is not built in {CACHE}: make trainers-build")
    folder = tmp_path / "examples" / NAME
    shutil.copytree(EXAMPLES / NAME, folder, ignore=shutil.ignore_patterns("data", "model", ".venv"))
    shutil.copy(EXAMPLES / "tiny_model.py", folder.parent)
    (folder / ".venv").symlink_to(CACHE / "openenv")
    monkeypatch.setattr(sys, "argv", ["prepare.py"])
    runpy.run_path(str(folder / "prepare.py"), run_name="__main__")
    file = folder / "job.yaml"
    written = yaml.safe_load(file.read_text())
    spec: dict[str, Any] = written["spec"]
    spec["algorithm"] |= {"steps": STEPS, "promptsPerStep": 4, "samplesPerPrompt": 4}
    latency = {"kind": "constant", "value": 1.0}
    spec["rollout"]["engine"] = {"kind": "scripted", "arguments": {"turns": [CALL], "latencySeconds": latency}}
    # The scripted engine ends each turn with a token of its own.
    spec["rollout"]["agent"] |= {"maxTurnTokens": 2, "environmentTimeoutSeconds": 120}
    spec["reward"] |= {"maxFailedShare": 1, "minSamplesPerGroup": 1}
    file.write_text(yaml.safe_dump(written))
    return file


def children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    with contextlib.suppress(OSError):
        lists = Path(f"/proc/{pid}/task").glob("*/children")  # any thread may have started it
        return [int(child) for each in lists for child in each.read_text().split()]
    return []


def kill_server(run: Path, running: subprocess.Popen[bytes]) -> None:
    """Kill the server while conversations use it, after the first step."""
    while running.poll() is None:
        time.sleep(0.2)
        with contextlib.suppress(OSError, ValueError):
            rollout = int((run / "logs" / "rollout-0.pid").read_text())
            conversations = [fork for template in children(rollout) for fork in children(template)]
            if conversations and (run / "steps.jsonl").read_text().strip():
                time.sleep(0.4)
                (server,) = children(int((run / "logs" / "environment-lamps.pid").read_text()))
                os.kill(server, signal.SIGKILL)
                return


def test_a_killed_openenv_server_is_started_again_and_invents_no_zero(job: Path, tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "output"
    command = [sys.executable, "-m", "plaudit_workers.cli", "run", str(job)]
    with output.open("wb") as log:
        running = subprocess.Popen(
            [*command, "--runs-folder", str(tmp_path), "--run", "run"], stdout=log, stderr=log, cwd=tmp_path
        )
        try:
            kill_server(run, running)
            code = running.wait(timeout=240)
        finally:
            running.kill()
            running.wait()
    assert code == 0, output.read_text()
    assert "environment-lamps" in output.read_text()  # the restart
    files = sorted((run / "samples").glob("*.parquet"))
    rows: list[dict[str, Any]] = [row for file in files for row in pyarrow.parquet.read_table(file).to_pylist()]
    assert {row["outcome"] for row in rows} == {"scored", "infra_error"}
    for row in rows:
        if row["outcome"] == "infra_error":
            assert row["score"] is None
        else:
            roles = [message["role"] for message in json.loads(row["completion_json"])]
            assert roles == ["assistant", "tool"] * 2
            assert row["score"] in (0.0, 0.5, 1.0)
    assert len({row["score"] for row in rows}) > 2  # the numbers of the groups differ
    assert {row["outcome"] for row in rows if row["step"] == STEPS} == {"scored"}
