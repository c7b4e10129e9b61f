"""``kind: http`` in a reward worker: the key of its Secret, limits and counts over all workers in the run's Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import faulty_server as faults
from faulty_server import Reply
from plaudit_metrics.sources.snapshot import take_snapshot
from plaudit_wire.names import Names
from plaudit_wire.records import Sample
from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.service.build import BuildContext, build_pipeline
from plaudit_workers.stream.transport import Transport


@pytest.fixture
async def server() -> AsyncIterator[Any]:
    async with faults.FaultyServer("/rm") as server:
        server.reply = lambda request, number: Reply(body={"score": 0.5})
        yield server


async def test_workers_of_a_run_share_the_limits_of_an_endpoint_and_send_its_key(
    make_reward: Callable[..., Any],
    server: Any,
    redis_server: RedisServer,
    transport: Transport,
    run_name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PLAUDIT_SECRET_RM_TOKEN", "hush")
    section = {"url": f"{server.origin}/rm", "shape": "slime", "apiKeySecret": {"name": "rm", "key": "token"}}
    reward = make_reward(
        [{"name": "theirs", "kind": "http", "http": section, "limits": {"requestsPerMinute": 2, "concurrency": 1}}]
    )
    address = RedisAddress(redis_server.url, redis_server.password)
    pipelines = [
        await build_pipeline(reward, name, BuildContext(reward, name, run_name, address)) for name in ("r-0", "r-1")
    ]
    asked = [asyncio.create_task(pipelines[i % 2].score(Sample("g", i, "d", "p", "r"))) for i in range(3)]
    async with asyncio.timeout(60):
        while sum(task.done() for task in asked) < 2:
            await asyncio.sleep(0.01)
    done, waiting = await asyncio.wait(asked, timeout=0.3)
    assert [task.result().value for task in done] == [0.5, 0.5]
    assert [request.headers["authorization"] for request in server.requests] == ["Bearer hush"] * 2
    assert server.most_at_a_time == 1
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    for pipeline in pipelines:
        await pipeline.close()
    seen = await take_snapshot(transport.commands, Names(run_name))
    assert seen.judge_requests == {("theirs", "200"): 2}
