"""A judge in a reward worker: limits and counts in the run's Redis, its key, its circuit, rankings of groups."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

import faulty_server as faults
from faulty_server import Reply
from plaudit_metrics.sources.snapshot import take_snapshot
from plaudit_wire.errors import RefusedError
from plaudit_wire.logs import traceparent
from plaudit_wire.names import Names
from plaudit_wire.records import Sample, WorkerRecord
from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.service.build import BuildContext, build_pipeline
from plaudit_workers.service.worker import ScoringOptions, ScoringWorker
from plaudit_workers.stream.consumer import ConsumerOptions
from plaudit_workers.stream.transport import Transport

Make = Callable[..., Any]
SAMPLE = Sample("t-0-1.0", 0, "d", "2 + 2?", "4")


@pytest.fixture
async def server() -> AsyncIterator[Any]:
    async with faults.FaultyServer() as server:
        yield server


@pytest.fixture
def judge(server: Any, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A scorer's section that asks ``server``."""
    (tmp_path / "judge.j2").write_text("Rate {{ response }}")
    (tmp_path / "rank.j2").write_text("{% for text in responses %}{{ text }}|{% endfor %}")

    def make(template: str = "judge.j2", **changes: Any) -> dict[str, Any]:
        about: dict[str, Any] = {
            "baseUrl": server.url,
            "model": "big",
            "promptTemplate": {"path": str(tmp_path / template)},
            "parse": changes.pop("parse", {"regex": "score: (.*)"}),
        }
        secret = changes.pop("apiKeySecret", None)
        return {
            "name": "big",
            "kind": "judge",
            "judge": about | ({"apiKeySecret": secret} if secret else {}),
            **changes,
        }

    return make


@pytest.fixture
def context(redis_server: RedisServer, run_name: str) -> Callable[..., BuildContext]:
    address = RedisAddress(redis_server.url, redis_server.password)
    return lambda reward, worker="reward-0": BuildContext(reward, worker, run_name, address)


async def test_workers_of_a_run_share_a_budget_and_report_their_use(
    make_reward: Make, judge: Make, server: Any, context: Make, transport: Transport, run_name: str
) -> None:
    reward = make_reward([judge(limits={"requestsPerMinute": 3})])
    pipelines = [await build_pipeline(reward, name, context(reward, name)) for name in ("reward-0", "reward-1")]
    asked = [asyncio.create_task(pipelines[i % 2].score(SAMPLE)) for i in range(5)]
    async with asyncio.timeout(60):
        while sum(task.done() for task in asked) < 3:
            await asyncio.sleep(0.01)
    done, waiting = await asyncio.wait(asked, timeout=1)
    assert [task.result().value for task in done] == [4.0] * 3
    assert len(server.requests) == 3
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    for pipeline in pipelines:
        await pipeline.close()
    seen = await take_snapshot(transport.commands, Names(run_name))
    assert seen.judge_requests == {("big", "200"): 3}
    assert seen.judge_tokens == {("big", "prompt"): 21, ("big", "completion"): 9}


async def test_a_judge_receives_the_trace_of_its_sample(
    make_reward: Make, judge: Make, server: Any, context: Make, run_name: str
) -> None:
    reward = make_reward([judge()])
    for share, sampled in ((1.0, True), (0.0, False)):
        pipeline = await build_pipeline(reward, "reward-0", replace(context(reward), traced_share=share))
        assert (await pipeline.score(SAMPLE)).value == 4.0
        await pipeline.close()
        said = server.requests[-1].headers["traceparent"]
        assert said == traceparent(run_name, SAMPLE.group, SAMPLE.index, sampled=sampled)
    pipeline = await build_pipeline(reward, "reward-0", context(reward))
    await pipeline.score(SAMPLE)
    await pipeline.close()
    assert "traceparent" not in server.requests[-1].headers


async def test_jobs_share_a_budget_by_its_name(
    make_reward: Make, judge: Make, context: Make, redis_server: RedisServer, run_name: str, monkeypatch: Any
) -> None:
    monkeypatch.setenv("PLAUDIT_SECRET_LIMITS_PASSWORD", redis_server.password)
    secret = {"name": "limits", "key": "password"}
    shared = {"url": redis_server.url, "key": run_name, "passwordSecret": secret}
    reward = make_reward([judge(limits={"requestsPerMinute": 1, "shared": shared})])
    first, other = [await build_pipeline(reward, "r", context(reward)) for _ in range(2)]
    assert (await first.score(SAMPLE)).value == 4.0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await other.score(SAMPLE)
    await first.close()
    await other.close()


async def test_outside_a_run_limits_hold_for_the_process_with_a_notice(
    make_reward: Make, judge: Make, server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server.reply = lambda request, number: Reply(after_s=0.02)
    pipeline = await build_pipeline(make_reward([judge(limits={"concurrency": 2})]), "score")
    await asyncio.gather(*(pipeline.score(SAMPLE) for _ in range(10)))
    assert server.most_at_a_time == 2
    assert "limits apply to this process only" in caplog.text
    await pipeline.close()


async def test_the_key_comes_from_a_file_or_the_environment_and_stays_in_the_worker(
    make_reward: Make, judge: Make, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import os\ndef read(answer):\n    return float('hush' in str(dict(os.environ)))"
    (tmp_path / "read.py").write_text(source)
    parse = {"python": {"path": str(tmp_path / "read.py"), "function": "read"}}
    reward = make_reward([judge(apiKeySecret={"name": "judge", "key": "token"}, parse=parse)])
    with pytest.raises(
        RefusedError,
        match=r"judge\.apiKeySecret: key .token. of Secret .judge. has no value.* set .*PLAUDIT_SECRET_JUDGE_TOKEN",
    ):
        await build_pipeline(reward, "reward-0")
    monkeypatch.setenv("PLAUDIT_SECRET_JUDGE_TOKEN", "hush-environment")
    pipeline = await build_pipeline(reward, "reward-0")
    assert (await pipeline.score(SAMPLE)).value == 0.0  # the child that parses does not see it
    await pipeline.close()
    (tmp_path / "secrets" / "judge").mkdir(parents=True)
    (tmp_path / "secrets" / "judge" / "token").write_text("hush-file\n")
    monkeypatch.setenv("PLAUDIT_SECRETS_FOLDER", str(tmp_path / "secrets"))
    pipeline = await build_pipeline(reward, "reward-0")
    await pipeline.score(SAMPLE)
    await pipeline.close()
    sent = [request.headers["authorization"] for request in server.requests]
    assert sent == ["Bearer hush-environment", "Bearer hush-file"]


async def test_a_template_that_cannot_work_refuses_the_job(make_reward: Make, judge: Make, tmp_path: Path) -> None:
    (tmp_path / "judge.j2").write_text("{{ answer }}")
    with pytest.raises(RefusedError, match=r"judge\.j2, line 1: unknown variable 'answer'"):
        await build_pipeline(make_reward([judge()]), "reward-0")


async def test_a_ranking_judge_sees_a_group_in_one_call(
    make_reward: Make, judge: Make, server: Any, make_feed: Make, run_worker: Make
) -> None:
    server.reply = lambda request, number: faults.Reply(body=faults.completion('{"ranks": [1, 3, 2]}'))
    scorer = judge("rank.j2", scope="group", parse={"jsonPath": "$.ranks"})
    reward = make_reward([{"name": "base", "function": "f", "weight": 10.0}, scorer], "def f(sample): return 1")
    feed = make_feed(reward)
    async with run_worker(reward):
        await feed.publish([["a", "b", "c"], ["d", "e"]])
        groups = await feed.ready(2)
    by_responses = {group.num_samples: group for group in (_Seen(group) for group in groups.values())}
    assert by_responses[3].values == [11.0, 13.0, 12.0]
    assert sorted(request.prompt for request in server.requests) == ["a|b|c|", "d|e|"]
    assert by_responses[2].outcomes == ["data_error"] * 2
    assert "3 values for 2 responses" in by_responses[2].reasons[0]


class _Seen:
    """The scores of a group that came back."""

    def __init__(self, group: Any) -> None:
        scorings = [sample.scoring for sample in group.samples]
        self.num_samples = len(scorings)
        self.values = [scoring.value for scoring in scorings]
        self.outcomes = [scoring.outcome for scoring in scorings]
        self.reasons = [scoring.reason for scoring in scorings]


async def test_an_open_circuit_is_in_the_heartbeat_and_holds_the_stream_back(
    make_reward: Make,
    judge: Make,
    server: Any,
    context: Make,
    make_feed: Make,
    redis_server: RedisServer,
    run_name: str,
) -> None:
    await server.stop()
    reward = make_reward([judge(retries=0)])
    feed = make_feed(reward)
    await feed.publish([["a", "b"]] * 60)
    own = await Transport.open(RedisAddress(redis_server.url, redis_server.password), run_name)
    worker = ScoringWorker(
        "reward-0",
        own,
        await build_pipeline(reward, "reward-0", context(reward)),
        ScoringOptions(max_concurrent_samples=20, consumer=ConsumerOptions(block_s=0.05)),
    )
    stop = asyncio.Event()
    running = asyncio.create_task(worker.run(stop))
    record = None
    while record is None or not record.circuits_open:
        await asyncio.sleep(0.05)
        encoded = await own.commands.hget(Names(run_name).worker_records, "reward-0")
        record = msgspec.msgpack.decode(encoded, type=WorkerRecord) if encoded else None
    assert record.circuits_open == ["big"]
    await server.start()
    groups = await feed.ready(60)
    outcomes = [sample.scoring.outcome for group in groups.values() for sample in group.samples]
    assert set(outcomes) == {"scored", "infra_error"}
    assert outcomes.count("scored") > len(outcomes) / 2  # what had not been taken was not lost
    stop.set()
    await running
    await own.close()
