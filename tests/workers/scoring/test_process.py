"""``python -m plaudit_workers.scoring`` as a process: refusals, a graceful end, a violent one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import textwrap
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from plaudit_workers.launch.redis import RedisServer, free_port
from waiting import runs, until

Make = Callable[..., Any]

JOB = """
apiVersion: plaudit.dev/v1alpha1
kind: RLJob
metadata: {{name: only-rewards}}
spec:
  reward:
    scorers:
      - {{name: mine, kind: python, python: {{path: {path}}}}}
"""


@pytest.fixture
async def start_process(redis_server: RedisServer, run_name: str, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    started: list[asyncio.subprocess.Process] = []

    async def start(source: str, **environment: str) -> asyncio.subprocess.Process:
        (tmp_path / "rewards.py").write_text(textwrap.dedent(source))
        (tmp_path / "job.yaml").write_text(JOB.format(path="rewards.py"))
        settings = {
            "PLAUDIT_JOB": str(tmp_path / "job.yaml"),
            "PLAUDIT_RUN": run_name,
            "PLAUDIT_RUN_FOLDER": str(tmp_path),
            "PLAUDIT_REDIS_URL": redis_server.url,
            "PLAUDIT_REDIS_PASSWORD": redis_server.password,
            "PLAUDIT_WORKER": "reward-0",
            **environment,
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "plaudit_workers.scoring"),
            env={**os.environ, **settings},
            stderr=asyncio.subprocess.PIPE,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def children_of(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children()]


REFUSED = [
    ("def compute_score(sample", {}, "line 1"),
    ("def compute_score(sample): return 1", {"PLAUDIT_REDIS_PASSWORD": "wrong"}, "refuses the password"),
    ("def compute_score(sample): return 1", {"PLAUDIT_JOB": "nowhere.yaml"}, "nowhere.yaml"),
]


@pytest.mark.long
@pytest.mark.parametrize(("source", "environment", "words"), REFUSED)
async def test_a_problem_is_printed_once_and_the_exit_code_is_2(
    start_process: Make, source: str, environment: dict[str, str], words: str
) -> None:
    process = await start_process(source, **environment)
    _, errors = await process.communicate()
    assert process.returncode == 2
    started, wrong = map(json.loads, errors.decode().splitlines())
    assert started["message"] == "started"
    assert words in wrong["error"]


@pytest.mark.long
async def test_a_start_while_redis_is_away_waits_and_can_be_stopped(start_process: Make) -> None:
    port = free_port()
    process = await start_process(
        "def compute_score(sample): return 1",
        PLAUDIT_REDIS_URL="redis://127.0.0.1:1/0",
        PLAUDIT_HEALTH_PORT=str(port),
    )
    _, waits = [json.loads(await process.stderr.readline()) for _ in range(2)]
    assert (waits["message"], waits["address"]) == (
        "cannot reach Redis; retrying. Is the service running?",
        "redis://127.0.0.1:1/0",
    )
    assert (status(f"http://127.0.0.1:{port}/healthz"), status(f"http://127.0.0.1:{port}/readyz")) == (200, 503)
    process.terminate()
    await process.communicate()
    assert process.returncode == 0


@pytest.mark.long
async def test_sigterm_ends_it_gracefully_and_it_answers_probes(start_process: Make) -> None:
    port = free_port()
    process = await start_process("def compute_score(sample): return 1", PLAUDIT_HEALTH_PORT=str(port))
    await until(lambda: status(f"http://127.0.0.1:{port}/readyz") == 200)
    assert status(f"http://127.0.0.1:{port}/healthz") == 200
    process.terminate()
    await process.communicate()
    assert process.returncode == 0


@pytest.mark.long
async def test_children_die_with_a_killed_worker_even_when_they_hang(start_process: Make, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    source = f"""
    import os, threading, time
    open({str(note)!r}, "a").write(str(os.getpid()) + "\\n")
    threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
    def compute_score(sample): return 1
    """
    process = await start_process(source)
    await until(lambda: note.exists() and len(note.read_text().splitlines()) == 2)
    pids = [int(line) for line in note.read_text().splitlines()]
    assert set(children_of(process.pid)) == set(pids)
    process.send_signal(signal.SIGKILL)
    await until(lambda: not any(runs(pid) for pid in pids))
