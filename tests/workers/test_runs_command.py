"""``plaudit runs``: what an external Redis holds of runs, and its removal."""

from __future__ import annotations

import json

import pytest
import redis

from plaudit_wire.names import Names
from plaudit_workers.cli import EXIT_REFUSED, main
from plaudit_workers.launch.redis import RedisServer


def test_finished_runs_are_listed_and_deleted_and_running_ones_stay(
    redis_server: RedisServer, run_name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAUDIT_REDIS_PASSWORD", redis_server.password)
    finished, running, foreign = f"{run_name}-a", f"{run_name}-b", f"{run_name}-c"
    with redis.Redis(port=redis_server.port, password=redis_server.password) as client:
        now = client.time()[0]
        for run, heartbeat in ((finished, now - 3600), (running, now)):
            client.zadd(Names(run).workers, {"reward-0": heartbeat})
            client.hset(Names(run).counters, "trained", 1)
        client.set(Names(foreign).workers, "not a sorted set")
        try:
            assert main(["runs", "list", "--redis", redis_server.url]) == 0
            listed = {line["run"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
            assert (listed[finished]["keys"], listed[running]["keys"]) == (2, 2)
            assert listed[foreign]["last_heartbeat_s"] is None
            assert listed[finished]["last_heartbeat_s"] >= 3600 > 20 > listed[running]["last_heartbeat_s"]
            there = ["--redis", redis_server.url]
            assert main(["runs", "delete", finished, *there]) == 0
            assert main(["runs", "delete", finished, running, *there]) == EXIT_REFUSED
            deleted, gone, kept = map(json.loads, capsys.readouterr().out.splitlines())
            assert deleted == {"run": finished, "deleted": 2}
            assert "no such run" in gone["problem"]
            assert "Stop the run first" in kept["problem"]
            assert not client.exists(Names(finished).counters)
            assert client.exists(Names(running).counters)
        finally:
            client.delete(Names(running).counters, Names(running).workers, Names(foreign).workers)


def test_runs_that_have_been_silent_for_days_are_deleted_together(
    redis_server: RedisServer, run_name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAUDIT_REDIS_PASSWORD", redis_server.password)
    old, recent, foreign = f"{run_name}-a", f"{run_name}-b", f"{run_name}-c"
    with redis.Redis(port=redis_server.port, password=redis_server.password) as client:
        now = client.time()[0]
        for run, silent_s in ((old, 40 * 86_400), (recent, 20 * 86_400)):
            client.zadd(Names(run).workers, {"reward-0": now - silent_s})
        client.set(Names(foreign).counters, "never reported")
        try:
            assert main(["runs", "delete", "--silent-for", "30", "--redis", redis_server.url]) == 0
            assert [json.loads(line)["run"] for line in capsys.readouterr().out.splitlines()] == [old]
            left = [client.exists(Names(old).workers), client.exists(Names(recent).workers)]
            assert [*left, client.exists(Names(foreign).counters)] == [0, 1, 1]
        finally:
            client.delete(Names(recent).workers, Names(foreign).counters)


def test_a_redis_that_refuses_is_reported(redis_server: RedisServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "delete", "--redis", redis_server.url]) == EXIT_REFUSED
    assert "needs the ids of runs" in capsys.readouterr().err
    assert main(["runs", "list", "--redis", redis_server.url]) == EXIT_REFUSED
    assert "PLAUDIT_REDIS_PASSWORD" in capsys.readouterr().err
