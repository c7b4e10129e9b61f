"""Redis, a gateway and a reward worker as processes of their own; Redis is killed, and its data is deleted."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from plaudit_client import RewardClient
from plaudit_workers.launch.redis import RedisServer, free_port

TOKEN = "token-of-one-caller"
CALLERS, EACH, KILLS = 40, 10, 2
FUNCTION = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.005)
    return float(solution_str == ground_truth)
"""


@pytest.fixture
async def lossy(tmp_path: Path, tokens: Path) -> AsyncIterator[tuple[RedisServer, str]]:
    """A service of real processes: its Redis, and the URL of its gateway."""
    (tmp_path / "reward.py").write_text(FUNCTION)
    scorer = {"name": "right", "kind": "python", "python": {"path": "reward.py"}, "isolation": "thread"}
    reward = {"scorers": [scorer], "workers": {"processes": 1, "maxConcurrentSamples": 256}}
    head = {"apiVersion": "plaudit.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "lossy"}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({**head, "spec": {"reward": reward}}))
    port = free_port()
    with RedisServer(tmp_path / "redis") as redis:
        environment = {
            **os.environ,
            "PLAUDIT_JOB": str(tmp_path / "job.yaml"),
            "PLAUDIT_RUN": "lossy",
            "PLAUDIT_RUN_FOLDER": str(tmp_path),
            "PLAUDIT_REDIS_URL": redis.url,
            "PLAUDIT_REDIS_PASSWORD": redis.password,
            "PLAUDIT_GATEWAY_PORT": str(port),
            "PLAUDIT_GATEWAY_TOKENS": str(tokens),
        }
        with ExitStack() as stack:
            for role in ("scoring", "gateway"):
                stack.enter_context(running(role, environment))
            yield redis, f"http://127.0.0.1:{port}"


@contextmanager
def running(role: str, environment: dict[str, str]) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-m", f"plaudit_workers.{role}"], env=environment)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
async def test_callers_get_their_results_though_redis_lost_its_data(lossy: Any) -> None:
    redis, url = lossy
    random.seed(7)
    answered: Counter[str] = Counter()
    async with RewardClient(url, TOKEN) as client:

        async def caller(number: int) -> None:
            for turn in range(EACH):
                result = await client.score(sample(number, turn))
                assert result.score == float(turn % 2)
                answered[result.id] += 1

        await client.score(sample(CALLERS, 1))
        callers = asyncio.gather(*(caller(number) for number in range(CALLERS)))
        for kill in range(KILLS):
            while len(answered) < CALLERS * EACH * (kill + random.random()) / (KILLS + 1):
                await asyncio.sleep(0.005)
            await asyncio.to_thread(lose_everything, redis)
        async with asyncio.timeout(120):
            await callers
        assert answered == {f"{number}-{turn}": 1 for number in range(CALLERS) for turn in range(EACH)}
        async with httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {TOKEN}"}) as http:
            page = (await http.get("/metrics")).text
        assert f'plaudit_gateway_samples_total{{caller="one",outcome="scored"}} {CALLERS * EACH + 1}.0' in page


def sample(caller: int, turn: int) -> dict[str, str]:
    return {"id": f"{caller}-{turn}", "response": str(turn % 2), "ground_truth": "1"}


def lose_everything(redis: RedisServer) -> None:
    """Kill Redis, delete its append-only file, and start it empty."""
    redis.kill()
    for file in redis.folder.rglob("*.aof*"):
        if file.is_file():
            file.unlink()
    redis.start()
