"""A real Prometheus scrapes a real run: alerts fire while scoring is slow and clear when it recovers.

In the middle the metrics service is killed and started again. The rules are the committed ones, every window shortened.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx

from plaudit_workers.launch.redis.server import RedisServer, free_port
from simulated_run import Simulation, make_plan

SCORER = """
import asyncio, pathlib

async def compute_score(data_source, solution_str, ground_truth, extra_info=None, slow_s=0, broken_file=""):
    await asyncio.sleep(0.25 if pathlib.Path(broken_file).exists() else 0)
    return 1.0
"""
BOTH = {("RewardLatencyBurn", "critical"), ("RewardStarvesTrainer", "warning")}


class Service:
    """The metrics service as a process that can be killed."""

    def __init__(self, server: RedisServer, run: str, folder: Path) -> None:
        self.port = free_port()
        self._environment = {
            "PATH": os.environ["PATH"],
            "PLAUDIT_RUN": run,
            "PLAUDIT_REDIS_URL": server.url,
            "PLAUDIT_REDIS_PASSWORD": server.password,
            "PLAUDIT_METRICS_PORT": str(self.port),
            "PLAUDIT_RUN_FOLDER": str(folder),
            "PLAUDIT_LOG_FILE": str(folder / "metrics.log"),
            "PLAUDIT_REWARD_LATENCY_THRESHOLD_S": "0.15",
        }
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "plaudit_metrics", env=self._environment
        )
        async with asyncio.timeout(60):
            while not await self._answers():
                await asyncio.sleep(0.05)

    async def _answers(self) -> bool:
        try:
            await self.get("steps")
        except httpx.TransportError:
            return False
        return True

    async def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            await self._process.wait()
            self._process = None

    async def get(self, path: str) -> Any:
        async with httpx.AsyncClient(timeout=30) as client:
            return (await client.get(f"http://127.0.0.1:{self.port}/api/v1/{path}")).json()


@contextlib.asynccontextmanager
async def going_on(simulation: Any, plan: Any) -> AsyncIterator[None]:
    """The run, until the context ends; then the step that is open is closed."""
    stop = asyncio.Event()
    async with simulation.workers():
        training = asyncio.create_task(simulation.train(plan, stop))
        try:
            yield
        finally:
            stop.set()
            await training


def firing(prometheus: Any, run: str) -> set[tuple[str, str]]:
    alerts = prometheus.query(f'ALERTS{{alertstate="firing", run="{run}"}}')
    return {(alert["metric"]["alertname"], alert["metric"]["severity"]) for alert in alerts}


async def until(condition: Callable[[set[tuple[str, str]]], bool], prometheus: Any, run: str) -> None:
    async with asyncio.timeout(120):
        while not condition(await asyncio.to_thread(firing, prometheus, run)):
            await asyncio.sleep(0.2)


async def test_alerts_fire_while_scoring_is_slow_and_clear_when_it_recovers(
    redis_server: RedisServer, run_name: str, prometheus: Any, tmp_path: Path
) -> None:
    simulation = Simulation(redis_server, run_name, tmp_path / "run")
    (simulation.folder / "rewards.py").write_text(SCORER)
    simulation.update_s = lambda groups: 0.4
    simulation.broken_file.touch()
    service = Service(redis_server, run_name, simulation.folder)
    await service.start()
    prometheus.scrape(service.port, run=run_name)
    plan = make_plan(steps=1000, prompts_per_step=8)
    try:
        async with going_on(simulation, plan):
            await until(lambda fires: fires >= BOTH, prometheus, run_name)
            await service.kill()
            simulation.broken_file.unlink()
            await simulation.until_steps(len(simulation.steps()) + 2)  # that no service has seen
            await service.start()
            await until(lambda fires: not fires & BOTH, prometheus, run_name)
            await simulation.until_steps(len(simulation.steps()) + 2)
        await no_step_is_lost(simulation, service)
    finally:
        await service.kill()


async def no_step_is_lost(simulation: Any, service: Service) -> None:
    closed = [step.step for step in simulation.steps()]
    async with asyncio.timeout(30):
        while [step["step"] for step in (await service.get("steps"))["steps"]] != closed:
            await asyncio.sleep(0.1)
    assert {step["records_missing"] for step in (await service.get("steps"))["steps"]} == {0}
