"""The service against a real Redis: it counts, answers, resumes and survives."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from redis.asyncio import Redis

from event_entries import encode_event
from plaudit_metrics.service.serve import CannotServeError, serve
from plaudit_metrics.service.settings import ServiceSettings
from plaudit_metrics.sources.steps import append_step
from plaudit_metrics.sources.stream import EventRecord
from plaudit_wire.errors import RefusedError
from plaudit_wire.names import Names
from plaudit_wire.records import ScorerRecord, StepRecord, WorkerRecord
from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.redis import RedisServer, free_port
from plaudit_workers.launch.role_process import serve_metrics
from stage_records import build_group, build_sample
from waiting import until


@pytest.fixture
def settings(redis_server: RedisServer, run_name: str) -> ServiceSettings:
    return ServiceSettings(run=run_name, redis=RedisAddress(redis_server.url, redis_server.password), port=free_port())


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[Redis]:
    client = Redis.from_url(redis_server.url, password=redis_server.password, protocol=2)
    yield client
    await client.aclose()


def records_of_step(step: int, incarnation: int = 1) -> list[EventRecord]:
    """Six samples in two groups, and the step."""
    opened = 1_000_000.0 + 100 * step
    every: list[EventRecord] = []
    for number in range(2):
        samples = [
            build_sample(
                f"t-{2 * step + number}-{incarnation}.0",
                i,
                admitted=opened,
                generation=1.0,
                score=i + 1.0,
                step=step,
            )
            for i in range(3)
        ]
        every += [*samples, build_group(samples, closed=opened + 50)]
    statistics = {"reward/mean": 0.5, "wait/score_s": 30.0, "trainer_wait_s": 30.0}
    every.append(StepRecord(step, incarnation, opened, opened + 60, 6, 2, statistics, verdict="reward"))
    return every


async def publish(redis: Redis, run: str, records: Sequence[EventRecord]) -> None:
    for record in records:
        await redis.xadd(Names(run).events, encode_event(record))


@asynccontextmanager
async def running(settings: ServiceSettings) -> AsyncIterator[httpx.AsyncClient]:
    stop = asyncio.Event()
    serving = asyncio.create_task(serve(settings, stop))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.port}") as client:
            await until(lambda: answers(client, "/readyz"))
            yield client
    finally:
        stop.set()
        await asyncio.wait_for(serving, 10)


async def answers(client: httpx.AsyncClient, path: str) -> bool:
    try:
        return (await client.get(path)).status_code == 200
    except httpx.TransportError:
        return False


def connections_of(port: int) -> list[Any]:
    """The server's ends of connections, in this process."""
    return [each for each in psutil.Process().net_connections("tcp") if each.laddr.port == port and each.raddr]


async def metric(client: httpx.AsyncClient, series: str) -> float | None:
    text = (await client.get("/metrics")).text
    found = [line.rpartition(" ")[2] for line in text.splitlines() if line.rpartition(" ")[0] == series]
    return float(found[0]) if found else None


async def metric_is(client: httpx.AsyncClient, series: str, value: float) -> bool:
    return await metric(client, series) == value


async def knows_steps(client: httpx.AsyncClient, steps: list[int]) -> bool:
    return [step["step"] for step in (await client.get("/api/v1/steps")).json()["steps"]] == steps


async def test_a_step_is_served_as_soon_as_it_is_closed(settings: ServiceSettings, redis: Redis) -> None:
    async with running(settings) as client:
        verdict = (await client.get("/api/v1/verdict")).json()
        assert (verdict["step"], verdict["verdict"], verdict["open"]["step"]) == (None, "", None)
        await publish(redis, settings.run, records_of_step(1) + records_of_step(2))
        await until(lambda: knows_steps(client, [1, 2]))

        steps = (await client.get("/api/v1/steps", params={"newest": 1})).json()["steps"]
        assert [step["reward/mean"] for step in steps] == [0.5]
        step = (await client.get("/api/v1/steps/2")).json()
        assert step["verdict"] == "reward"
        assert step["explanation"].startswith("The trainer waited for scorers")
        assert step["records_missing"] == 0
        samples = (await client.get("/api/v1/steps/2/samples", params={"slowest": 2})).json()["samples"]
        assert [sample["index"] for sample in samples] == [2, 2]
        assert samples[0]["stages_s"] == {"generation": 1.0, "score": 3.0}
        verdict = (await client.get("/api/v1/verdict")).json()
        assert (verdict["step"], verdict["verdict"], verdict["recent"]) == (2, "reward", {"reward": 2})
        assert verdict["recent_verdict"] == "reward"
        assert {part: s for part, s in verdict["seconds"].items() if s} == {"score_s": 30.0, "trainer_s": 30.0}


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/v1/steps/99", 404),
        ("/api/v1/steps/99/samples", 404),
        ("/api/v1/steps?newest=0", 400),
        ("/api/v1/steps?newest=many", 400),
        ("/api/v1/nothing", 404),
        ("/healthz", 200),
        ("/readyz", 200),
    ],
)
async def test_every_question_has_a_fitting_answer(settings: ServiceSettings, path: str, status: int) -> None:
    async with running(settings) as client:
        assert (await client.get(path)).status_code == status


async def test_the_reasons_of_failed_samples_are_served_before_their_step_closes(
    settings: ServiceSettings, redis: Redis
) -> None:
    raised = ScorerRecord("data_error", reason="KeyError: 'answer' (/srv/reward.py:2 in compute_score)")
    failing = [build_sample("t-90-1.0", index, outcome="data_error", scorers={"mine": raised}) for index in range(3)]

    async def failures(client: httpx.AsyncClient) -> Any:
        return (await client.get("/api/v1/failures")).json()

    async with running(settings) as client:
        assert (await failures(client))["failures"] == []
        await publish(redis, settings.run, [*failing, build_sample("t-91-1.0")])
        await until(lambda: samples_are(4, client))
        shown = await failures(client)
        assert (shown["samples"], shown["unscored"]) == (4, 3)
        assert shown["failures"] == [
            {
                "scorer": "mine",
                "outcome": "data_error",
                "reason": "KeyError: 'answer' (reward.py:2 in compute_score)",
                "count": 3,
            }
        ]
        await publish(redis, settings.run, records_of_step(1))
        await until(lambda: knows_steps(client, [1]))
        assert (await failures(client))["failures"] == []


async def samples_are(count: int, client: httpx.AsyncClient) -> bool:
    return bool((await client.get("/api/v1/failures")).json()["samples"] == count)


async def test_a_restart_goes_on_without_counting_twice_or_losing_a_step(
    settings: ServiceSettings, redis: Redis
) -> None:
    first, second = records_of_step(1), records_of_step(2)
    async with running(settings) as client:
        await publish(redis, settings.run, first + second[:4])
        await until(lambda: knows_steps(client, [1]))
        await until(lambda: _equals(client, 'plaudit_samples_total{outcome="scored"}', 9))
    await publish(redis, settings.run, second[4:6])
    async with running(settings) as client:
        await publish(redis, settings.run, second[6:])
        await until(lambda: knows_steps(client, [1, 2]))
        assert await metric(client, 'plaudit_samples_total{outcome="scored"}') == 3
        assert await metric(client, "plaudit_step_seconds_count") == 1
        assert await metric(client, "plaudit_step") == 2
        assert (await client.get("/api/v1/steps/2")).json()["records_missing"] == 0
        assert len((await client.get("/api/v1/steps/1/samples")).json()["samples"]) == 6


async def _equals(client: httpx.AsyncClient, series: str, value: float) -> bool:
    return await metric(client, series) == value


async def test_an_entry_that_was_under_way_in_a_crash_is_counted_by_the_next_start(
    settings: ServiceSettings, redis: Redis
) -> None:
    events = Names(settings.run).events
    await publish(redis, settings.run, records_of_step(1))
    await redis.xgroup_create(events, "metrics", id="0")
    await redis.xreadgroup("metrics", "metrics", {events: ">"}, count=4)
    async with running(settings) as client:
        await until(lambda: knows_steps(client, [1]))
        assert await metric(client, 'plaudit_samples_total{outcome="scored"}') == 6
        assert (await client.get("/api/v1/steps/1")).json()["records_missing"] == 0
    assert (await redis.xpending(events, "metrics"))["pending"] == 0


async def test_entries_that_were_trimmed_while_they_were_under_way_cost_only_themselves(
    settings: ServiceSettings, redis: Redis
) -> None:
    events = Names(settings.run).events
    await publish(redis, settings.run, records_of_step(1))
    await redis.xgroup_create(events, "metrics", id="0")
    await redis.xreadgroup("metrics", "metrics", {events: ">"}, count=4)
    await redis.xtrim(events, maxlen=2, approximate=False)
    async with running(settings) as client:
        await until(lambda: knows_steps(client, [1]))
        assert (await client.get("/api/v1/steps/1")).json()["records_missing"] == 6
        await publish(redis, settings.run, records_of_step(2))
        await until(lambda: knows_steps(client, [1, 2]))
        assert (await client.get("/api/v1/steps/2")).json()["records_missing"] == 0
        assert await metric(client, "plaudit_records_missing_total") == 6


async def test_entries_that_were_trimmed_after_they_were_read_are_not_lost(
    settings: ServiceSettings, redis: Redis
) -> None:
    steps = [records_of_step(step) for step in (1, 2)]
    async with running(settings) as client:
        await publish(redis, settings.run, steps[0] + steps[1])
        await until(lambda: knows_steps(client, [1, 2]))
    await redis.xtrim(Names(settings.run).events, maxlen=len(steps[0] + steps[1]) - 3, approximate=False)
    async with running(settings) as client:
        await until(lambda: knows_steps(client, [1, 2]))
        assert [(await client.get(f"/api/v1/steps/{step}")).json()["records_missing"] for step in (1, 2)] == [0, 0]


async def test_steps_that_events_no_longer_holds_come_from_the_runs_folder(
    settings: ServiceSettings, redis: Redis, tmp_path: Path
) -> None:
    for step in (1, 2):
        append_step(tmp_path / "steps.jsonl", records_of_step(step)[-1])
    await publish(redis, settings.run, records_of_step(3))
    async with running(replace(settings, run_folder=tmp_path)) as client:
        await until(lambda: knows_steps(client, [1, 2, 3]))
        assert await metric(client, "plaudit_step_seconds_count") == 1


async def test_lost_keys_and_damaged_entries_do_not_stop_it(settings: ServiceSettings, redis: Redis) -> None:
    async with running(settings) as client:
        await publish(redis, settings.run, records_of_step(1))
        await until(lambda: knows_steps(client, [1]))
        await redis.delete(Names(settings.run).events)
        await redis.xadd(Names(settings.run).events, {"kind": "weather", "record": "sunny"})
        await publish(redis, settings.run, records_of_step(2))
        await until(lambda: knows_steps(client, [1, 2]))


@pytest.mark.long
async def test_a_client_that_reads_nothing_keeps_no_connection_after_the_end(settings: ServiceSettings) -> None:
    async with running(settings):
        _, writer = await asyncio.open_connection("127.0.0.1", settings.port, limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 5000)  # more than the kernel's buffers hold
        await asyncio.sleep(0.5)
        assert connections_of(settings.port)
    assert not connections_of(settings.port)
    writer.transport.abort()


async def test_streams_workers_and_memory_are_shown(settings: ServiceSettings, redis: Redis) -> None:
    import msgspec

    keys = Names(settings.run)
    await redis.xgroup_create(keys.stream("samples"), "reward", id="0", mkstream=True)
    for number in range(5):
        await redis.xadd(keys.stream("samples"), {"payload": str(number)})
    await redis.xreadgroup("reward", "reward-1", {keys.stream("samples"): ">"}, count=2)
    seconds, _ = await redis.time()
    for record in (WorkerRecord("reward-1", "reward", slots=4, busy=2), WorkerRecord("gone", "rollout")):
        await redis.hset(keys.worker_records, record.worker, msgspec.msgpack.encode(record))
        await redis.zadd(keys.workers, {record.worker: seconds - (0 if record.worker == "reward-1" else 60)})
    async with running(settings) as client:
        await until(lambda: _equals(client, 'plaudit_stream_undelivered{stream="samples"}', 3))
        assert await metric(client, 'plaudit_stream_in_flight{stream="samples"}') == 2
        oldest_s = await metric(client, 'plaudit_stream_oldest_undelivered_seconds{stream="samples"}')
        assert oldest_s is not None
        assert 0 <= oldest_s < 30
        assert await metric(client, 'plaudit_workers{role="reward",state="busy"}') == 1
        assert await metric(client, 'plaudit_workers{role="rollout",state="idle"}') is None
        assert (await metric(client, "plaudit_redis_memory_bytes") or 0) > 100_000
        assert await metric(client, "plaudit_redis_aof_ok") == 1


async def test_a_scrape_is_in_prometheus_format(settings: ServiceSettings, redis: Redis) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    async with running(settings) as client:
        await publish(redis, settings.run, records_of_step(1))
        await until(lambda: knows_steps(client, [1]))
        scraped = (await client.get("/metrics")).content
    command = [promtool, "check", "metrics"]
    checked = await asyncio.to_thread(subprocess.run, command, input=scraped, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


async def test_redis_may_die_and_come_back(tmp_path: Path, run_name: str) -> None:
    with RedisServer(tmp_path / "redis", persistence="always") as server:
        settings = ServiceSettings(run_name, RedisAddress(server.url, server.password), port=free_port())
        async with running(settings) as client:
            redis = Redis.from_url(server.url, password=server.password, protocol=2)
            await publish(redis, run_name, records_of_step(1))
            await until(lambda: knows_steps(client, [1]))
            server.kill()
            await until(lambda: metric_is(client, "plaudit_redis_up", 0))
            assert (await client.get("/api/v1/steps/1")).status_code == 200
            server.start()
            await publish(redis, run_name, records_of_step(2))
            await until(lambda: knows_steps(client, [1, 2]))
            assert await metric(client, 'plaudit_samples_total{outcome="scored"}') == 12
            await redis.aclose()


async def test_a_wrong_password_is_refused_with_one_message(settings: ServiceSettings) -> None:
    wrong = replace(settings, redis=replace(settings.redis, password="not this"))
    with pytest.raises(CannotServeError, match="PLAUDIT_REDIS_PASSWORD"):
        await asyncio.wait_for(serve(wrong, asyncio.Event()), 10)


async def test_a_port_that_is_taken_is_refused_with_one_message(
    settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(settings):
        with pytest.raises(CannotServeError, match="PLAUDIT_METRICS_PORT"):
            await asyncio.wait_for(serve(settings, asyncio.Event()), 10)
        environment = {**settings.redis.environment(), "PLAUDIT_RUN": settings.run}
        for name, value in {**environment, "PLAUDIT_METRICS_PORT": str(settings.port)}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(RefusedError, match="PLAUDIT_METRICS_PORT"):  # which ``plaudit run`` prints
            await asyncio.wait_for(serve_metrics(None, asyncio.Event()), 10)


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)])
async def test_as_a_process_it_ends_with_its_signal_and_leaves_nothing_unread(
    settings: ServiceSettings, redis: Redis, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    environment = {
        "PATH": os.environ["PATH"],
        "PLAUDIT_RUN": settings.run,
        **settings.redis.environment(),
        "PLAUDIT_METRICS_PORT": str(settings.port),
        "PLAUDIT_LOG_FILE": str(tmp_path / "logs" / "metrics.log"),
    }
    process = await asyncio.to_thread(subprocess.Popen, [sys.executable, "-m", "plaudit_metrics"], env=environment)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.port}") as client:
            await until(lambda: answers(client, "/readyz"))
            await publish(redis, settings.run, records_of_step(1))
            await until(lambda: knows_steps(client, [1]))
        process.send_signal(number)
        assert await asyncio.to_thread(process.wait, 10) == code
    finally:
        process.kill()
        process.wait()
    assert "serving" in (tmp_path / "logs" / "metrics.log").read_text()
    async with running(settings) as client:
        await publish(redis, settings.run, records_of_step(2))
        await until(lambda: knows_steps(client, [1, 2]))


def test_without_its_environment_it_names_the_missing_variables() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "plaudit_metrics"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert "PLAUDIT_RUN" in ended.stderr
