"""What the judge's tests share: a server that misbehaves, scorers that ask it, budgets in a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

import faulty_server as faults
from plaudit_reward.endpoint.access import EndpointUsage
from plaudit_reward.endpoint.budget import Budget, Limiter, LocalBudget, RateLimits, RedisBudget
from plaudit_reward.endpoint.judge import JudgeClient, JudgeScorer, Parser, PromptTemplate, RegexParser, TokenEstimate
from plaudit_wire.redis import redis_client
from plaudit_workers.launch.redis import RedisServer


@pytest.fixture
async def server() -> AsyncIterator[Any]:
    async with faults.FaultyServer() as server:
        yield server


@pytest.fixture
def usage() -> EndpointUsage:
    return EndpointUsage()


@pytest.fixture
async def make_judge(server: Any, usage: EndpointUsage, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Opens a judge that asks ``server``; all are closed after the test."""
    opened: list[JudgeScorer] = []

    async def make(
        template: str = "Rate {{ response }}.",
        parser: Parser | None = None,
        budget: Budget | None = None,
        *,
        group: bool = False,
        limits: tuple[float, float] | None = None,
        schema: Any = None,
        **client: Any,
    ) -> JudgeScorer:
        path = tmp_path / "judge.j2"
        path.write_text(template)
        judge = JudgeScorer(
            "big",
            PromptTemplate(str(path), group=group),
            JudgeClient(server.url, "big", usage, **client),
            parser or RegexParser(r"score: (\S+)", group=group),
            Limiter(budget or LocalBudget(RateLimits()), "big"),
            TokenEstimate(client.get("arguments", {})),
            limits=limits,
            schema=schema,
        )
        opened.append(judge)
        await judge.open()
        return judge

    yield make
    for judge in opened:
        await judge.close()


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[Redis]:
    client = redis_client(redis_server.url, password=redis_server.password)
    yield client
    await client.aclose()


@pytest.fixture
async def make_budget(redis_server: RedisServer, run_name: str) -> AsyncIterator[Callable[..., RedisBudget]]:
    """A worker's side of this test's budget."""
    made: list[RedisBudget] = []

    def make(limits: RateLimits, worker: str = "reward-0", **options: Any) -> RedisBudget:
        client = redis_client(redis_server.url, password=redis_server.password)
        made.append(RedisBudget(client, f"plaudit:{{{run_name}}}:limits:test", worker, limits, **options))
        return made[-1]

    yield make
    for budget in made:
        await budget.close()
