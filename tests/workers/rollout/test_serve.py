"""The process: a job file in, published samples out, a drained exit."""

import asyncio
from pathlib import Path

import pytest

from plaudit_wire.errors import RefusedError, StoppedError
from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.redis import free_port
from plaudit_workers.process import ProcessSettings
from plaudit_workers.rollout.worker import serve, until_closed
from plaudit_workers.training import worker as training
from waiting import until

JOB = """
apiVersion: plaudit.dev/v1alpha1
kind: RLJob
metadata: {{name: served}}
spec:
  model: {{source: /nowhere}}
  data: {{train: {{path: train.parquet}}}}
  algorithm: {{steps: 1, promptsPerStep: 2, samplesPerPrompt: 2}}
  rollout:
    engine: {engine}
    agent: {agent}
    sampling: {{maxTokens: 8}}
  reward: {{scorers: [{{name: one, kind: rule}}]}}
  trainer: {{}}
"""
SCORES_ONLY = """
apiVersion: plaudit.dev/v1alpha1
kind: RLJob
metadata: {name: service}
spec:
  reward: {scorers: [{name: one, kind: rule}]}
"""
SCRIPTED = "{kind: scripted, arguments: {latencySeconds: {kind: constant, value: 0.02}}}"


@pytest.fixture
def settings(tmp_path, redis_server, run_name):
    def write(engine: str = SCRIPTED, agent: str = "{kind: singleTurn}", **changes: object) -> ProcessSettings:
        job = tmp_path / "job.yaml"
        job.write_text(JOB.format(engine=engine, agent=agent))
        about = {
            "job_path": job,
            "run": run_name,
            "run_folder": tmp_path,
            "redis": RedisAddress(redis_server.url, redis_server.password),
            "worker": "rollout-0",
            "health_port": 0,
            "log_file": None,
        }
        return ProcessSettings(**{**about, **changes})

    return write


async def readiness(port: int) -> str:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        return "closed"
    writer.write(b"GET /readyz HTTP/1.1\r\n\r\n")
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer.split(b" ")[1].decode()


async def test_it_gets_ready_with_the_announcement_works_and_drains(settings, run) -> None:
    port, stop = free_port(), asyncio.Event()
    serving = asyncio.create_task(serve(settings(health_port=port), stop))

    async def answers(code: str) -> bool:
        return await readiness(port) == code

    await until(lambda: answers("503"))
    await run.announce(0)
    await until(lambda: answers("200"))
    await run.admit("t-0-1.0", n=2)
    await run.published("t-0-1.0", 2)
    stop.set()
    assert await asyncio.wait_for(serving, 20) == 0
    assert await readiness(port) == "closed"


async def test_a_follower_needs_no_redis_and_runs_until_it_is_stopped(settings, monkeypatch) -> None:
    monkeypatch.setenv("PLAUDIT_REPLICA_RANK", "1")
    monkeypatch.setenv("PLAUDIT_REPLICA_LEADER", "127.0.0.1")
    stop = asyncio.Event()
    job = settings(f"{SCRIPTED}\n    podsPerReplica: 2", redis=RedisAddress("redis://127.0.0.1:1/0"))
    serving = asyncio.create_task(serve(job, stop))
    await asyncio.sleep(0.1)
    assert not serving.done()
    stop.set()
    assert await asyncio.wait_for(serving, 20) == 0


async def test_a_stopped_follower_stays_until_its_leader_has_drained() -> None:
    port = free_port()
    leader = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", port)
    staying = asyncio.create_task(until_closed("127.0.0.1", port))
    await asyncio.sleep(0.1)
    assert not staying.done()
    leader.close()
    await asyncio.wait_for(staying, 20)


@pytest.mark.parametrize(
    ("engine", "agent", "message"),
    [
        ("{kind: scripted, arguments: {speed: 3}}", "{kind: singleTurn}", "arguments"),
        ("{kind: vllm, arguments: {load_format: auto}}", "{kind: singleTurn}", "load_format cannot be set"),
        (SCRIPTED, "{kind: custom, path: absent.py, class: Mine}", "absent.py"),
    ],
)
async def test_an_unworkable_job_is_refused_before_anything_is_opened(settings, engine, agent, message) -> None:
    with pytest.raises(RefusedError, match=message):
        await serve(settings(engine, agent, redis=RedisAddress("redis://127.0.0.1:1/0")), asyncio.Event())


async def test_a_job_file_that_is_not_there_is_refused(settings) -> None:
    with pytest.raises(RefusedError, match="absent"):
        await serve(settings(job_path=Path("absent.yaml")), asyncio.Event())


async def test_a_start_while_redis_is_away_waits_until_it_is_stopped(settings) -> None:
    stop = asyncio.Event()
    serving = asyncio.create_task(serve(settings(redis=RedisAddress("redis://127.0.0.1:1/0")), stop))
    await asyncio.sleep(0.1)
    assert not serving.done()
    stop.set()
    with pytest.raises(StoppedError):
        await serving


@pytest.mark.parametrize("serve_role", [serve, training.serve], ids=["rollout", "trainer"])
async def test_a_job_that_only_scores_is_refused(settings, serve_role) -> None:
    about = settings()
    about.job_path.write_text(SCORES_ONLY)
    with pytest.raises(RefusedError, match=r"spec\.rollout and spec\.trainer are missing"):
        await serve_role(about, asyncio.Event())
