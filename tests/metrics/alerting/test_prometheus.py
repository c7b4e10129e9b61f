"""A real Prometheus scrapes the real service: alerts fire while rewards are slow and clear when they recover.

The rules are the committed ones with every window shortened 600 times.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from plaudit_metrics.alerting.alerts import alert_rules
from plaudit_metrics.alerting.recording import recording_rules
from plaudit_metrics.alerting.windows import Windows
from plaudit_metrics.events import encode_event
from plaudit_metrics.generate import yaml_of
from plaudit_metrics.keys import Keys
from plaudit_metrics.records import StepRecord
from plaudit_metrics.service import ServiceSettings, serve
from plaudit_workers.launch.redis_server import RedisServer, free_port

Build = Callable[..., Any]
SHORTENED = Windows(scale=1 / 600, least_s=2)


@contextlib.contextmanager
def prometheus(folder: Path, target: int) -> Iterator[str]:
    """A Prometheus that scrapes the port; gives its address."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    (folder / "rules.yaml").write_text(yaml_of(recording_rules(SHORTENED)))
    (folder / "alerts.yaml").write_text(yaml_of(alert_rules("run", SHORTENED)))
    (folder / "prometheus.yaml").write_text(
        "global: {scrape_interval: 250ms, evaluation_interval: 250ms}\n"
        "rule_files: [rules.yaml, alerts.yaml]\n"
        f"scrape_configs: [{{job_name: plaudit, static_configs: [{{targets: ['127.0.0.1:{target}']}}]}}]\n"
    )
    port = free_port()
    process = subprocess.Popen(
        [
            program,
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


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


async def firing(client: httpx.AsyncClient) -> set[tuple[str, str]]:
    try:
        alerts = (await client.get("/api/v1/alerts")).json()["data"]["alerts"]
    except httpx.TransportError:
        return set()
    return {(each["labels"]["alertname"], each["labels"]["severity"]) for each in alerts if each["state"] == "firing"}


async def until(condition: Callable[[set[tuple[str, str]]], bool], client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(60):
        while not condition(await firing(client)):
            await asyncio.sleep(0.1)


async def test_alerts_fire_while_rewards_are_slow_and_clear_when_they_recover(
    redis_server: RedisServer, run_name: str, sample: Build, tmp_path: Path
) -> None:
    port = free_port()
    settings = ServiceSettings(run_name, redis_server.url, redis_server.password, port=port)
    redis = Redis.from_url(redis_server.url, password=redis_server.password, protocol=2)
    run = Run(redis, run_name, sample)
    both = {("RewardLatencyBurn", "page"), ("RewardStarvesTrainer", "ticket")}
    with prometheus(tmp_path, port) as address:
        async with in_background(settings, run), httpx.AsyncClient(base_url=address) as client:
            await until(lambda fires: both <= fires, client)
            run.slow = False
            await until(lambda fires: not both & fires, client)
            query = {"query": "run:plaudit_step_wait:ratio_rate30m{cause='score'}"}
            answer = (await client.get("/api/v1/query", params=query)).json()
            assert 0 < float(answer["data"]["result"][0]["value"][1]) < 0.2
    await redis.aclose()
