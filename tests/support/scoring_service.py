"""A scoring service on the session's Redis: a real reward worker on user files, offered as ``serve`` offers it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from builders import job_document
from plaudit_job.load import load_job
from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.service.build import build_pipeline, scoring_version
from plaudit_workers.service.client import RewardClient
from plaudit_workers.service.worker import ScoringOptions, ScoringWorker, offering
from plaudit_workers.stream.consumer import ConsumerOptions
from plaudit_workers.stream.transport import Transport

REWARD = """
import pathlib, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "broken":
        raise ValueError("on purpose")
    if solution_str == "lone":
        raise ValueError("half of a pair: \\ud800")
    return float(solution_str == ground_truth)

def slow(sample):
    while sample.response == "held" and not pathlib.Path(__file__).with_name("let-go").exists():
        time.sleep(0.01)
    time.sleep(0.05 if sample.index else 0.2)
    return float(sample.ground_truth)

def truth(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth)

def long(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "note": "x" * 2000}

def share(completions, **columns):
    return [len(c) / sum(map(len, completions)) for c in completions]
"""


@dataclass(frozen=True)
class Running:
    """A service and how to reach it."""

    run: str
    server: RedisServer
    job: Any

    def client(self, **arguments: Any) -> RewardClient:
        return RewardClient(self.server.url, run=self.run, password=self.server.password, **arguments)

    @asynccontextmanager
    async def worker(self, name: str = "reward-0") -> AsyncIterator[ScoringWorker]:
        """One more reward worker."""
        transport = await Transport.open(RedisAddress(self.server.url, self.server.password), self.run)
        pipeline = await build_pipeline(self.job.spec.reward, name)
        options = ScoringOptions(consumer=ConsumerOptions(block_s=0.05), version=scoring_version(self.job))
        worker = ScoringWorker(name, transport, pipeline, options)
        stop = asyncio.Event()
        running = asyncio.create_task(worker.run(stop))
        try:
            yield worker
        finally:
            stop.set()
            await running
            await transport.close()


StartService = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.fixture
def start_service(redis_server: RedisServer, run_name: str, tmp_path: Path) -> StartService:
    """A service with these scorers (functions of ``REWARD``; default: ``compute_score``), workers and Redis."""

    @asynccontextmanager
    async def start(
        *scorers: dict[str, Any],
        workers: int = 1,
        slots: int = 256,
        server: RedisServer = redis_server,
        **reward: Any,
    ) -> AsyncIterator[Running]:
        (tmp_path / "reward.py").write_text(REWARD)
        chosen = scorers or (
            {"name": "right", "kind": "python", "python": {"path": "reward.py"}, "isolation": "thread"},
        )
        sizes = {"processes": 1, "maxConcurrentSamples": slots}
        job = job_document("scores", reward={"scorers": list(chosen), "workers": sizes, **reward})
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
        running = Running(run_name, server, load_job(tmp_path / "job.yaml"))
        transport = await Transport.open(RedisAddress(server.url, server.password), run_name)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(offering(running.job, transport))
            for number in range(workers):
                await stack.enter_async_context(running.worker(f"reward-{number}"))
            while not await transport.commands.exists(transport.names.service):
                await asyncio.sleep(0.01)
            yield running
        keys = [key async for key in transport.commands.scan_iter(transport.names.prefix + "*")]
        await transport.commands.unlink(*keys)
        await transport.close()

    return start
