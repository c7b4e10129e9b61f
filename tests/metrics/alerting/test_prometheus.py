"""A real Prometheus scrapes a real run: alerts fire while scoring is slow and clear when it recovers.

In the middle the metrics service is killed and started again. The rules are the committed ones, every window shortened.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from metrics_process import MetricsProcess
from plaudit_workers.launch.redis import RedisServer
from simulated_run import Simulation, make_plan
from waiting import until_in_thread

SCORER = """
import asyncio, pathlib

async def compute_score(data_source, solution_str, ground_truth, extra_info=None, slow_s=0, broken_file=""):
    await asyncio.sleep(0.25 if pathlib.Path(broken_file).exists() else 0)
    return 1.0
"""
LATENCY = {"PLAUDIT_REWARD_LATENCY_THRESHOLD_S": "0.15"}
BOTH = {("RewardLatencyBurn", "critical"), ("RewardStarvesTrainer", "warning")}


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


@pytest.mark.broken
async def test_alerts_fire_while_scoring_is_slow_and_clear_when_it_recovers(
    redis_server: RedisServer, run_name: str, prometheus: Any, tmp_path: Path
) -> None:
    simulation = Simulation(redis_server, run_name, tmp_path / "run")
    (simulation.folder / "rewards.py").write_text(SCORER)
    simulation.update_s = lambda groups: 0.4
    simulation.broken_file.touch()
    service = MetricsProcess(redis_server, run_name, simulation.folder, LATENCY)
    await service.start()
    prometheus.scrape(service.port, run=run_name)
    plan = make_plan(steps=1000, prompts_per_step=8)
    try:
        async with going_on(simulation, plan):
            await until_in_thread(lambda: firing(prometheus, run_name) >= BOTH)
            await service.kill()
            simulation.broken_file.unlink()
            await simulation.until_steps(len(simulation.steps()) + 2)  # that no service has seen
            await service.start()
            await until_in_thread(lambda: not firing(prometheus, run_name) & BOTH)
            await simulation.until_steps(len(simulation.steps()) + 2)
        await no_step_is_lost(simulation, service)
    finally:
        await service.kill()


async def no_step_is_lost(simulation: Any, service: MetricsProcess) -> None:
    closed = [step.step for step in simulation.steps()]
    async with asyncio.timeout(30):
        while [step["step"] for step in (await service.get("steps"))["steps"]] != closed:
            await asyncio.sleep(0.1)
    assert {step["records_missing"] for step in (await service.get("steps"))["steps"]} == {0}
