"""Rollouts and processes of tools killed at random during conversations: nothing is lost, nothing half is trained."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

pytestmark = pytest.mark.timeout(420)

TOOL = '''
import time

def look_up(key: str):
    """Look a key up.

    Args:
        key: what to look up
    """
    time.sleep(0.5)
    return f"value of {key}", 0.25
'''
CALL = '<tool_call>{"name": "look_up", "arguments": {"key": "a"}}</tool_call>'
NUM_CALLS = 3
VICTIMS = ("tool", "rollout", "tool", "tool")


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        lists = Path(f"/proc/{pid}/task").glob("*/children")  # any thread may have started it
        return [int(child) for each in lists for child in each.read_text().split()]
    return []


def tool_processes(rollout: int) -> list[int]:
    """The forks of the template process of a rollout."""
    templates = [
        child for child in children(rollout) if "agents.template" in Path(f"/proc/{child}/cmdline").read_text()
    ]
    return [process for template in templates for process in children(template)]


def kill_along(running: subprocess.Popen[str], pid_file: Path, draw: random.Random) -> dict[str, int]:
    """Kills the victims one after the other, at random moments of conversations, until the run ends."""
    victims = list(VICTIMS)
    killed = {"rollout": 0, "tool": 0}
    while victims and running.poll() is None:
        time.sleep(draw.uniform(0.02, 0.15))
        with contextlib.suppress(OSError, ValueError):
            rollout = int(pid_file.read_text())
            tools = tool_processes(rollout)
            if not tools:
                continue  # kill in the middle of conversations only
            victim = victims.pop(0)
            os.kill(rollout if victim == "rollout" else draw.choice(tools), signal.SIGKILL)
            killed[victim] += 1
    return killed


def test_kills_during_conversations_lose_no_sample_and_train_no_half_one(
    example: Callable[[str], Path],
    change_job: Callable[..., Path],
    plaudit_command: Callable[..., list[str]],
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(example("10-agent"), tmp_path / "job")
    (folder / "my_tools.py").write_text(TOOL)
    job = change_job(
        folder / "job.yaml",
        data__train__maxPromptLength=2048,
        algorithm__steps=4,
        rollout__engine__arguments={"turns": [CALL] * NUM_CALLS + ["It is 4."]},
        rollout__agent={
            "kind": "tools",
            "tools": [{"path": "my_tools.py", "function": "look_up"}],
            "onToolFailure": "fail",
        },
        reward__maxFailedShare=1,
        reward__minSamplesPerGroup=1,
        lifecycle={"failurePolicy": {"maxRestarts": 20}},
    )
    log = tmp_path / "output"
    with log.open("w") as output:
        running = subprocess.Popen(plaudit_command(job), stdout=output, stderr=output, text=True, cwd=tmp_path)
        try:
            killed = kill_along(running, tmp_path / "run" / "logs" / "rollout-0.pid", random.Random(5))
            code = running.wait(timeout=300)
        finally:
            running.kill()
    assert code == 0, log.read_text()
    assert killed["rollout"] >= 1
    assert killed["tool"] >= 1
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    assert (ledger["problems"], ledger["duplicates"], ledger["open"]) == ([], 0, 0)
    assert ledger["admitted"] == ledger["trained"] + ledger["dropped"]
    files = sorted((tmp_path / "run" / "samples").glob("*.parquet"))
    rows: list[dict[str, Any]] = [row for file in files for row in pyarrow.parquet.read_table(file).to_pylist()]
    scored = [row for row in rows if row["outcome"] == "scored"]
    assert scored
    for row in scored:
        roles = [message["role"] for message in json.loads(row["completion_json"])]
        assert roles == ["assistant", "tool"] * NUM_CALLS + ["assistant"]
        assert row["score"] == pytest.approx(0.25 * NUM_CALLS)
    assert {row["outcome"] for row in rows} <= {"scored", "infra_error"}
    assert all(row["score"] is None for row in rows if row["outcome"] != "scored")
