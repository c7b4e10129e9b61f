"""Redis goes away in the middle: the worker keeps what it has scored and commits it afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.service.build import build_pipeline
from plaudit_workers.service.worker import ScoringWorker
from plaudit_workers.stream.transport import Transport

Make = Callable[..., Any]

SOURCE = """
import time
def compute_score(sample):
    time.sleep(0.5)
    return float(sample.response)
"""


async def test_scores_outlive_a_restart_of_redis(
    tmp_path: Path, make_reward: Make, make_feed_on: Make, run_name: str
) -> None:
    reward = make_reward([{"name": "mine", "function": "compute_score", "isolation": "thread"}], SOURCE)
    with RedisServer(tmp_path / "own-redis", persistence="always") as server:
        address = RedisAddress(server.url, server.password)
        transport = await Transport.open(address, run_name)
        own = await Transport.open(address, run_name)
        feed = make_feed_on(transport, reward)
        ids = await feed.publish([["1", "2"], ["3", "4"]])
        worker, stop = ScoringWorker("reward-0", own, await build_pipeline(reward, "reward-0")), asyncio.Event()
        running = asyncio.create_task(worker.run(stop))
        while worker.busy < 4:
            await asyncio.sleep(0.01)
        server.kill()
        await asyncio.sleep(0.8)  # the scores are there and cannot be committed
        assert worker.busy == 4
        server.start()
        groups = await feed.ready(2)
        stop.set()
        await running
        await own.close()
        await transport.close()
    values = [[sample.scoring.value for sample in groups[group].samples] for group in ids]
    assert values == [[1.0, 2.0], [3.0, 4.0]]
    assert all(sample.deliveries == 1 for group in groups.values() for sample in group.samples)
