"""A user's function sees nothing of its worker that would let it pass for the worker, or use the keys of its user."""

from __future__ import annotations

import asyncio
import ctypes
import textwrap
from pathlib import Path

from plaudit_wire.redis import RedisAddress, RedisTls
from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.process import ProcessSettings
from plaudit_workers.service.client import RewardClient
from plaudit_workers.service.worker import serve

PR_GET_DUMPABLE, PR_SET_DUMPABLE = 3, 4
libc = ctypes.CDLL(None)

FUNCTIONS = """
    import os

    def of_worker(data_source, solution_str, ground_truth, extra_info=None):
        return float(len([name for name in os.environ if name.startswith(("PLAUDIT_SECRET", "PLAUDIT_REDIS"))]))

    def of_child(data_source, solution_str, ground_truth, extra_info=None):
        keys = [name for name in os.environ if name.startswith(("HF_TOKEN", "AWS_", "OPENAI_"))]
        return of_worker(data_source, solution_str, ground_truth) + len(keys)
"""
JOB = """
apiVersion: plaudit.dev/v1alpha1
kind: RLJob
metadata: {name: curious}
spec:
  reward:
    workers: {processes: 1}
    scorers:
      - {name: child, kind: python, python: {path: curious.py, function: of_child}, isolation: process}
      - {name: inline, kind: python, python: {path: curious.py, function: of_worker}, isolation: inline}
"""


async def test_children_have_no_secret_and_the_worker_cannot_be_looked_into(
    redis_server: RedisServer, run_name: str, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "curious.py").write_text(textwrap.dedent(FUNCTIONS))
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "password").write_text(redis_server.password)
    address = RedisAddress(redis_server.url, tls=RedisTls("ca.pem", "certificate.pem", "key.pem"), username="default")
    environment = address.environment() | {
        "PLAUDIT_JOB": str(tmp_path / "job.yaml"),
        "PLAUDIT_RUN": run_name,
        "PLAUDIT_RUN_FOLDER": str(tmp_path),
        "PLAUDIT_REDIS_PASSWORD_FILE": str(tmp_path / "password"),
        "PLAUDIT_SECRETS_FOLDER": str(tmp_path),
        "PLAUDIT_SECRET_JUDGE_KEY": "secret",
        "HF_TOKEN": "secret",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "OPENAI_API_KEY": "secret",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # another test may have served in this process before
    assert libc.prctl(PR_GET_DUMPABLE, 0, 0, 0, 0) == 1
    stop = asyncio.Event()
    working = asyncio.create_task(serve(ProcessSettings.from_environment(), stop))
    client = RewardClient(redis_server.url, password=redis_server.password, run=run_name, wait_s=20.0)
    async with client:
        await client.submit([{"response": "a"}])
        [result] = [result async for result in client.results()]
    assert {name: output.value for name, output in result.scorers.items()} == {"child": 0.0, "inline": 0.0}
    assert libc.prctl(PR_GET_DUMPABLE, 0, 0, 0, 0) == 0  # the worker is this process
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    stop.set()
    assert await working == 0
