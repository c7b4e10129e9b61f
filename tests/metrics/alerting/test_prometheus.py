"""A real Prometheus scrapes the real service: alerts fire while rewards are slow and clear when they recover.

The rules are the committed ones with every window shortened 600 times.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from plaudit_metrics.events import encode_event
from plaudit_metrics.keys import Keys
from plaudit_metrics.records import StepRecord
from plaudit_metrics.service import ServiceSettings, serve
from plaudit_workers.launch.redis_server import RedisServer, free_port

Build = Callable[..., Any]
pytestmark = pytest.mark.xdist_group("observed run")


class Run:
    """A made run: publishes steps whose rewards are slow or fast, without end."""

    def __init__(self, redis: Redis, run: str, sample: Build) -> None:
        self._redis = redis
        self._events = Keys(run).events
        self._sample = sample
        self.slow = True

    async def go_on(self, stop: asyncio.Event) -> None:
        for step in itertools.count(1):
            if stop.is_set():
                return
            seconds, _ = await self._redis.time()
            pipeline = self._redis.pipeline()
            for index in range(40):
                score_s = 60.0 if self.slow and index % 2 else 1.0
                record = self._sample(f"t-{step}-1.0", index, admitted=seconds - 100.0, score=score_s, step=step)
                pipeline.xadd(self._events, encode_event(record))
            exposed_s = 30.0 if self.slow else 1.0
            statistics = {"exposed_reward_s": exposed_s, "wait/score_s": exposed_s, "trainer_wait_s": exposed_s}
            record = StepRecord(step, 1, seconds - 60.0, float(seconds), 40, 1, statistics, verdict="reward")
            pipeline.xadd(self._events, encode_event(record))
            await pipeline.execute()
            await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def in_background(settings: ServiceSettings, run: Run) -> AsyncIterator[None]:
    """The service and the run, until the context ends."""
    stop = asyncio.Event()
    serving, going_on = asyncio.create_task(serve(settings, stop)), asyncio.create_task(run.go_on(stop))
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(going_on, 10)
        code = await asyncio.wait_for(serving, 10)
    assert code == 0


def firing(prometheus: Any, run: str) -> set[tuple[str, str]]:
    alerts = prometheus.query(f'ALERTS{{alertstate="firing", run="{run}"}}')
    return {(alert["metric"]["alertname"], alert["metric"]["severity"]) for alert in alerts}


async def until(condition: Callable[[set[tuple[str, str]]], bool], prometheus: Any, run: str) -> None:
    async with asyncio.timeout(60):
        while not condition(await asyncio.to_thread(firing, prometheus, run)):
            await asyncio.sleep(0.1)


async def test_alerts_fire_while_rewards_are_slow_and_clear_when_they_recover(
    redis_server: RedisServer, run_name: str, sample: Build, prometheus: Any
) -> None:
    settings = ServiceSettings(run_name, redis_server.url, redis_server.password, port=free_port())
    redis = Redis.from_url(redis_server.url, password=redis_server.password, protocol=2)
    run = Run(redis, run_name, sample)
    both = {("RewardLatencyBurn", "page"), ("RewardStarvesTrainer", "ticket")}
    prometheus.scrape(settings.port, run=run_name)
    async with in_background(settings, run):
        await until(lambda fires: both <= fires, prometheus, run_name)
        run.slow = False
        await until(lambda fires: not both & fires, prometheus, run_name)
        query = f"run:plaudit_step_wait:ratio_rate30m{{cause='score', run='{run_name}'}}"
        (waited,) = await asyncio.to_thread(prometheus.query, query)
        assert 0 < float(waited["value"][1]) < 0.2
    await redis.aclose()
