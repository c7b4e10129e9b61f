"""A Redis that replies late is a cause of its own, while it lasts and in the steps' records; a fast one never is."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bad_network import BadNetwork
from metrics_process import MetricsProcess
from plaudit_metrics.statistics.verdict import REPLY_KEY, explain, reasoning, verdict, verdict_over
from plaudit_workers.launch.redis import RedisServer
from simulated_run import Simulation, make_plan
from waiting import until

FIGURES = {"step_s": 10.0, "trainer_wait_s": 9.0, "wait/score_s": 9.0, "reward_pipeline/outcome/scored": 8.0}


def port_of(server: RedisServer) -> int:
    return int(server.url.rsplit(":", 1)[1].partition("/")[0])


@pytest.mark.long
async def test_a_slow_redis_is_slow_and_not_away_while_it_lasts(
    redis_server: RedisServer, run_name: str, tmp_path: Path
) -> None:
    late = random.Random(3)
    async with BadNetwork(port_of(redis_server)) as network:
        network.late_s = lambda: late.uniform(0.1, 0.9)
        far = SimpleNamespace(url=f"redis://127.0.0.1:{network.port}/0", password=redis_server.password)
        service = MetricsProcess(far, run_name, tmp_path)  # type: ignore[arg-type]
        said: dict[str, str] = {}

        async def named() -> bool:
            found = (await service.get("queues"))["open"]
            said[found["waits_for"]] = found["text"]
            return "redis-slow" in said

        try:
            await service.start()
            await until(named, within_s=120, every_s=0.1)
            assert "Redis takes 0." in said["redis-slow"]
            assert "redis" not in said
            network.late_s = lambda: 0.0
            await until(lambda: _fast(service), within_s=120, every_s=0.2)
        finally:
            await service.kill()


async def _fast(service: MetricsProcess) -> bool:
    return bool((await service.get("queues"))["open"]["waits_for"] == "nothing")


async def test_the_records_of_its_steps_name_it_too(redis_server: RedisServer, run_name: str, tmp_path: Path) -> None:
    async with BadNetwork(port_of(redis_server)) as network:
        simulation = Simulation(redis_server, run_name, tmp_path / "run")
        simulation.port = network.port
        late = random.Random(4)
        network.late_s = lambda: late.uniform(0.1, 0.2)
        async with simulation.workers():
            done, _ = await simulation.train(make_plan(steps=1))
    assert done
    slow = simulation.steps()[-1]
    assert slow.statistics[REPLY_KEY] >= 0.1
    assert slow.verdict == "redis"
    assert "Redis replied slowly" in explain("redis", slow.statistics)


@pytest.mark.parametrize(
    ("reply_s", "expected"),
    [(0.001, "reward"), (0.09, "reward"), (0.15, "reward"), (0.2, "redis"), (0.9, "redis")],
)
def test_replies_hold_a_step_of_which_ten_take_a_fifth(reply_s: float, expected: str) -> None:
    statistics = FIGURES | {REPLY_KEY: reply_s}
    assert verdict(statistics) == expected
    assert reasoning(statistics)[-1].holds
    assert verdict_over([statistics, FIGURES | {REPLY_KEY: reply_s}]) == expected


def test_a_step_into_which_ten_slow_replies_do_not_fit_was_not_held_by_them() -> None:
    short = {key: value * 0.07 for key, value in FIGURES.items()} | {REPLY_KEY: 0.3}
    assert verdict(short) == verdict_over([short] * 20) == "reward"


def test_slow_replies_of_one_short_step_do_not_name_many_long_ones() -> None:
    steps: list[dict[str, Any]] = [FIGURES | {REPLY_KEY: 0.3}, *(FIGURES | {REPLY_KEY: 0.001} for _ in range(9))]
    assert verdict(steps[0]) == "redis"
    assert verdict_over(steps) == "reward"


def test_an_outage_is_explained_as_an_outage() -> None:
    assert "Redis did not answer" in explain("redis", FIGURES | {"wait/redis_s": 9.0, REPLY_KEY: 0.001})
