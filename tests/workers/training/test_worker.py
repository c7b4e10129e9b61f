"""The trainer's process: what it refuses at its start, and torch's GPU allocator."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import pytest

from plaudit_job.load import dump_job
from plaudit_metrics.sources.steps import read_ending
from plaudit_wire.redis import RedisAddress
from plaudit_workers.process import EXIT_CRASHED, EXIT_REFUSED, ProcessSettings, serve_guarded
from plaudit_workers.training.worker import serve

PROGRAM = """
import os
from plaudit_workers.training.worker import prefer_expandable_segments
prefer_expandable_segments(os.environ)
import torch
print(torch._C._accelerator_getAllocatorSettings())
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}, "max_split_size_mb:512"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "expandable_segments:False"),
    ],
)
def test_torch_reads_the_settings_of_the_environment_or_expandable_segments(own: dict[str, str], expected: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.endswith("_ALLOC_CONF")}
    program = [sys.executable, "-c", PROGRAM]
    found = subprocess.run(program, env=inherited | own, capture_output=True, text=True, check=True).stdout
    assert found.strip() == expected


GOOD_ROW = {"data_source": "a", "prompt": [{"role": "user", "content": "1="}], "reward_model": {"ground_truth": "1"}}


@pytest.fixture
def start(tmp_path, make_job, redis_server, run_name):
    """Starts the trainer of a job with two rows, and returns its end."""

    async def started(second_row, **spec):
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [GOOD_ROW, second_row])))
        job = make_job({"data": {"train": {"path": str(tmp_path / "rows.jsonl")}}, **spec})
        (tmp_path / "job.yaml").write_text(dump_job(job))
        redis = RedisAddress(redis_server.url, redis_server.password)
        settings = ProcessSettings(tmp_path / "job.yaml", run_name, tmp_path, redis, "trainer-0", 0, None)
        return await serve_guarded(serve, settings, asyncio.Event())

    return started


async def test_a_row_that_cannot_travel_is_refused_with_file_row_and_remedy(start):
    ending = await start({**GOOD_ROW, "reward_model": {"ground_truth": 10**30}})
    assert ending.code == EXIT_REFUSED
    assert "rows.jsonl: row 2: column reward_model.ground_truth is an integer beyond 64 bits" in ending.message
    assert ending.message.endswith("Write it as text")


@pytest.mark.long
async def test_a_trainer_records_why_the_run_ended_and_forgets_it_when_it_starts_again(start, tmp_path, monkeypatch):
    """On Kubernetes nobody else does: the live page and `plaudit report` read it from the run's folder."""
    ending = await start({**GOOD_ROW, "reward_model": {"ground_truth": 10**30}})
    recorded = read_ending(tmp_path)
    assert (recorded.code, recorded.message) == (ending.code, ending.message)
    monkeypatch.setenv("PLAUDIT_RESTARTED", "1")
    (tmp_path / "steps.jsonl").mkdir()
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert (await start(GOOD_ROW, trainer={"sinks": ["wandb"]})).code == EXIT_CRASHED
    assert read_ending(tmp_path) is None


@pytest.mark.long
async def test_whatever_fails_at_the_start_is_a_refusal_and_at_a_restart_a_crash(start, tmp_path, monkeypatch):
    (tmp_path / "steps.jsonl").mkdir()  # the sink reads it
    monkeypatch.setenv("WANDB_MODE", "offline")
    ending = await start(GOOD_ROW, trainer={"sinks": ["wandb"]})
    assert ending.code == EXIT_REFUSED
    assert ending.message.startswith("the sinks of spec.trainer.sinks cannot be prepared: IsADirectoryError: ")
    monkeypatch.setenv("PLAUDIT_RESTARTED", "1")
    ending = await start(GOOD_ROW, trainer={"sinks": ["wandb"]})
    assert ending.code == EXIT_CRASHED
