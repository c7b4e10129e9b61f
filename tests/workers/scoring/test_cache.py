"""``cache``: equal samples are scored once, over all workers of a run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

import faulty_server as faults
from faulty_server import Reply
from plaudit_metrics.sources.snapshot import take_snapshot
from plaudit_reward.pipeline import Pipeline
from plaudit_wire.names import Names
from plaudit_wire.records import Sample
from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.service.build import BuildContext, build_pipeline
from plaudit_workers.stream.transport import Transport

Start = Callable[..., AbstractAsyncContextManager[Pipeline]]


@pytest.fixture
async def server() -> AsyncIterator[Any]:
    async with faults.FaultyServer("/rm") as server:
        server.reply = lambda request, number: Reply(body={"score": float(number)})
        yield server


@pytest.fixture
def start(make_reward: Callable[..., Any], server: Any, redis_server: RedisServer, run_name: str) -> Start:
    @asynccontextmanager
    async def pipeline(
        worker: str = "r-0", address: RedisAddress | None = None, **cache: int
    ) -> AsyncIterator[Pipeline]:
        section = {"url": f"{server.origin}/rm", "shape": "slime"}
        reward = make_reward([{"name": "theirs", "kind": "http", "http": section, "cache": cache}], retries=0)
        redis = address or RedisAddress(redis_server.url, redis_server.password)
        built = await build_pipeline(reward, worker, BuildContext(reward, worker, run_name, redis))
        yield built
        await built.close()

    return pipeline


def sample(response: str, group: str = "g") -> Sample:
    return Sample(group, 0, "d", "p", response, extra_info={"a": 1, "b": 2})


async def test_an_equal_sample_is_sent_once_by_all_workers_together(
    start: Start, server: Any, transport: Transport, run_name: str
) -> None:
    async with start("r-0") as one, start("r-1") as other:
        first = await one.score(sample("same"))
        again = await asyncio.gather(*(worker.score(sample("same", "h")) for worker in (one, other)))
        assert {record.value for record in again} == {first.value}
        assert len(server.requests) == 1
        assert (await other.score(sample("another"))).value != first.value
    assert len(server.requests) == 2
    seen = await take_snapshot(transport.commands, Names(run_name))
    assert dict(seen.judge_requests) == {("theirs", "200"): 2, ("theirs", "cached"): 2}
    assert dict(seen.cache_reads) == {("theirs", "hit"): 2, ("theirs", "miss"): 2}


NUMBERED = """
class Numbered:
    num_calls = 0

    def __call__(self, solution_str):
        self.num_calls += 1
        return float(self.num_calls)

    def post_process_scores(self, scores):
        return [score + 100.0 for score in scores]
"""


async def test_scores_of_a_function_are_kept_for_one_version_of_the_scoring(
    make_reward: Callable[..., Any], transport: Transport, redis_server: RedisServer, run_name: str
) -> None:
    reward = make_reward(
        [{"name": "mine", "function": "Numbered", "cache": {}}], NUMBERED, workers={"processes": 1}, retries=0
    )
    address = RedisAddress(redis_server.url, redis_server.password)

    async def values(version: str, *samples: Sample) -> list[float | None]:
        context = BuildContext(reward, "r-0", run_name, address, version=version)
        pipeline = await build_pipeline(reward, "r-0", context)
        assert pipeline.scores_groups  # by the class's post_process_scores
        found = [(await pipeline.score(each)).value for each in samples]
        await pipeline.close()
        return found

    longer = Sample("g", 0, "d", "p", "same", extra_info={"a": 1, "b": 2}, response_tokens=7)
    first = await values("one", sample("same"), sample("same", "h"), longer)
    assert first == [1.0, 1.0, 2.0]
    assert await values("one", sample("new"), sample("same")) == [1.0, 1.0]  # in a new process: 1, and the kept 1
    assert await values("two", sample("new"), sample("same")) == [1.0, 2.0]
    seen = await take_snapshot(transport.commands, Names(run_name))
    assert dict(seen.cache_reads) == {("mine", "hit"): 2, ("mine", "miss"): 5}
    assert not seen.judge_requests


async def test_of_equal_samples_at_the_same_time_one_is_sent(start: Start, server: Any) -> None:
    async with start() as pipeline:
        records = await asyncio.gather(*(pipeline.score(sample("same")) for _ in range(8)))
    assert {record.value for record in records} == {records[0].value}
    assert len(server.requests) == 1


async def test_a_failure_is_not_kept(start: Start, server: Any) -> None:
    reply = server.reply
    async with start() as pipeline:
        server.reply = lambda request, number: Reply(status=422)
        assert (await pipeline.score(sample("same"))).outcome == "data_error"
        server.reply = reply
        assert (await pipeline.score(sample("same"))).outcome == "scored"


async def test_no_more_entries_are_kept_than_allowed(
    start: Start, server: Any, transport: Transport, run_name: str
) -> None:
    async with start(entries=6) as pipeline:
        for number in range(20):
            await pipeline.score(sample(str(number)))
    keys = [key async for key in transport.commands.scan_iter(f"{Names(run_name).prefix}cache:*")]
    assert 1 <= sum([await transport.commands.hlen(key) for key in keys]) <= 6
    assert all([0 < await transport.commands.ttl(key) <= 86_400 for key in keys])


async def test_samples_are_scored_while_redis_is_unavailable(start: Start, server: Any) -> None:
    async with start(address=RedisAddress("redis://127.0.0.1:1/0")) as pipeline:
        records = [await pipeline.score(sample("same")) for _ in range(2)]
    assert [record.outcome for record in records] == ["scored", "scored"]
    assert len(server.requests) == 2
