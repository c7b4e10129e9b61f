"""A real Prometheus on real runs: a trainer is killed, rollouts leave, a run ends. Windows are shortened 300 times.

While an alert fires, the first command of its entry in the runbook gives the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from metrics_process import MetricsProcess
from plaudit_operator.cache import Cache
from plaudit_operator.operator import OperatorSeries
from plaudit_operator.runtime.kinds import RLJOB
from plaudit_workers.launch.redis import RedisServer
from simulated_run import Simulation
from waiting import until, until_in_thread

pytestmark = pytest.mark.broken
TRAINING = {"PLAUDIT_SCHEDULE": "on-policy", "PLAUDIT_MAX_STALENESS": "0"}
PLAN = {"steps": 100_000, "prompts_per_step": 4}


@pytest.fixture
async def run(redis_server: RedisServer, run_name: str, prometheus: Any, tmp_path: Path) -> Any:
    """A run with its metrics service, whose trainer and workers the test starts."""
    simulation = Simulation(redis_server, run_name, tmp_path / "run")
    simulation.update_s = lambda groups: 0.2
    service = MetricsProcess(redis_server, run_name, simulation.folder, TRAINING)
    await service.start()
    prometheus.scrape(service.port, run=run_name)
    simulation.metrics = service
    yield simulation
    await simulation.end_trainers()
    await service.kill()


async def looked(run: Any) -> tuple[dict[str, Any], set[str]]:
    """Return what ``$RUN/api/v1/queues | jq '.looks[-1].streams, .workers'`` shows: the streams and the live roles."""
    queues = await run.metrics.get("queues")
    return queues["looks"][-1]["streams"], {worker["role"] for worker in queues["workers"]}


async def until_gone(run: Any, role: str) -> None:
    """Wait until the run's page shows no process of a role any more."""

    async def gone() -> bool:
        return role not in (await looked(run))[1]

    await until(gone, within_s=60, every_s=0.2)


async def trainer_of(simulation: Any, **plan: Any) -> asyncio.subprocess.Process:
    """Start a trainer as a process; return when a step has closed."""
    process = await simulation.trainer_process({"update_s": 0.2, "plan": PLAN | plan})
    closed = len(simulation.steps())
    await until_in_thread(lambda: len(simulation.steps()) > closed)
    return process


async def test_a_killed_trainer_raises_its_alert_until_another_one_trains(run: Any, prometheus: Any) -> None:
    async with run.workers():
        trainer = await trainer_of(run)
        await until_in_thread(
            lambda: "NoTrainer" not in prometheus.firing(run.name)
        )  # it fired before the first heartbeat
        trainer.kill()
        await trainer.wait()
        await until_gone(run, "trainer")
        await until_in_thread(lambda: "NoTrainer" in prometheus.firing(run.name))
        _, roles = await looked(run)
        assert roles == {"rollout", "reward"}
        trainer = await trainer_of(run)
        await until_in_thread(lambda: "NoTrainer" not in prometheus.firing(run.name))
        trainer.kill()
        await trainer.wait()


async def test_a_run_without_rollouts_raises_their_alert_and_not_that_of_the_trainer(run: Any, prometheus: Any) -> None:
    others = {"NoTrainer", "NoRewardWorkers"}
    async with run.workers():
        trainer = await trainer_of(run)
        await until_in_thread(  # those of roles that had not sent their first heartbeat
            lambda: not prometheus.firing(run.name) & {"NoReadyRollout", *others}
        )
    async with run.workers(rollouts=0):
        await until_gone(run, "rollout")
        await until_in_thread(lambda: "NoReadyRollout" in prometheus.firing(run.name))
        streams, roles = await looked(run)
        assert streams["prompts"]["undelivered"] + streams["prompts"]["in_flight"] > 0
        assert roles == {"reward", "trainer"}
        await until_in_thread(lambda: not prometheus.firing(run.name) & others)
    async with run.workers():
        await until_in_thread(lambda: "NoReadyRollout" not in prometheus.firing(run.name))
        trainer.kill()
        await trainer.wait()


async def test_a_run_that_ended_raises_no_alert_where_an_operator_reports_its_end(run: Any, prometheus: Any) -> None:
    with reported(prometheus, run.name, "Complete"):
        async with run.workers():
            trainer = await trainer_of(run, steps=3)
            assert await trainer.wait() == 0
        alert = f'ALERTS{{alertname="NoTrainer", alertstate="firing", run="{run.name}"}}'
        without = f'sum without (role, state) (plaudit_workers{{role="trainer", run="{run.name}"}}) == 0'
        # Long enough for an alert that holds for two seconds here, and is kept for as long.
        await until_in_thread(lambda: bool(prometheus.query(f"count_over_time(({without})[7s:500ms]) >= 14")))
        assert not prometheus.query(f"max_over_time({alert}[3s])")


@contextmanager
def reported(prometheus: Any, run: str, phase: str) -> Iterator[None]:
    """The operator's series of one job while the context lasts."""
    cache = Cache()
    status = {"run": run, "phase": phase, "conditions": []}
    metadata = {"name": run, "namespace": "team", "uid": "0c5c2a5e", "labels": {}}
    cache.replace(RLJOB, [{"metadata": metadata, "spec": {}, "status": status}])
    series = OperatorSeries(cache, lambda: 0, lambda: True, lambda: {"RLJob": 3.0})
    with prometheus.scraping(series.registry):
        yield
