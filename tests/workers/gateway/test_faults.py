"""Kills and restarts under load: no score is lost, none is invented, none differs."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from plaudit_client import Result, RewardClient
from plaudit_workers.cli import main
from plaudit_workers.launch.redis import RedisServer
from waiting import until

COUNT = 400


def samples(prefix: str = "n") -> list[dict[str, str]]:
    return [{"response": str(i % 2), "ground_truth": "1", "id": f"{prefix}{i}"} for i in range(COUNT)]


async def scored(client: RewardClient, given: list[dict[str, str]]) -> list[Result]:
    return await asyncio.gather(*map(client.score, given))


@pytest.mark.long
async def test_a_gateway_that_is_killed_and_restarted_loses_nothing(start_service: Any, gateway_process: Any) -> None:
    async with (
        start_service(workers=0) as service,
        gateway_process(service) as gateway,
        RewardClient(f"http://127.0.0.1:{gateway.port}", "token-of-one-caller") as client,
    ):
        scoring = asyncio.create_task(scored(client, samples()))
        while not await asyncio.to_thread(length, service.server, f"plaudit:{{{service.run}}}:samples"):
            await asyncio.sleep(0.02)
        gateway.kill()
        async with service.worker():
            gateway.start()
            assert [each.score for each in await scoring] == [float(i % 2) for i in range(COUNT)]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.health_port}") as http:
            assert "plaudit_gateway_samples_total{" in (await http.get("/metrics")).text  # without a token
            assert (await http.get("/v1/service")).status_code == 404


async def test_a_sample_accepted_by_one_gateway_is_answered_by_another(start_service: Any, start_gateway: Any) -> None:
    async with start_service(workers=0) as service:
        async with start_gateway(service) as one, one.client() as client, one.http() as http:
            leaving = asyncio.create_task(client.score(samples()[1]))
            while (await http.get("/v1/scores/n1")).status_code != 202:
                await asyncio.sleep(0.01)
            leaving.cancel()
        async with start_gateway(service) as other, other.http() as http, service.worker():
            assert (await http.get("/v1/scores/n1?wait=20")).json()["score"] == 1.0


async def test_two_gateways_give_the_same_answer(start_service: Any, start_gateway: Any) -> None:
    async with (
        start_service() as service,
        start_gateway(service) as one,
        start_gateway(service) as other,
        one.client() as first,
        other.client() as second,
    ):
        both = await asyncio.gather(scored(first, samples()), scored(second, samples()))
    assert [each.seconds for each in both[0]] == [each.seconds for each in both[1]]


async def test_samples_that_redis_has_lost_are_submitted_again(start_service: Any, start_gateway: Any) -> None:
    async with (
        start_service(workers=0, slots=COUNT) as service,
        start_gateway(service) as gateway,
        gateway.client() as client,
    ):
        scoring = asyncio.create_task(scored(client, samples()))
        names = f"plaudit:{{{service.run}}}:"
        while await asyncio.to_thread(length, service.server, names + "samples") < COUNT:
            await asyncio.sleep(0.02)
        await asyncio.to_thread(lose, service.server, names)
        async with service.worker():
            assert [each.score for each in await scoring] == [float(i % 2) for i in range(COUNT)]


async def test_a_restart_of_redis_is_waited_for(
    start_gateway: Any, start_service: Any, redis_server: RedisServer
) -> None:
    async with start_service() as service, start_gateway(service) as gateway, gateway.client() as client:
        await client.score(samples("before")[1])
        scoring = asyncio.create_task(scored(client, samples()))
        await asyncio.to_thread(pause, redis_server)
        assert [each.score for each in await scoring] == [float(i % 2) for i in range(COUNT)]


async def test_a_file_is_scored_over_http_and_continued(
    start_service: Any, start_gateway: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, output = tmp_path / "samples.jsonl", tmp_path / "scores.jsonl"
    file.write_text("".join(json.dumps(sample) + "\n" for sample in samples()))
    monkeypatch.setenv("PLAUDIT_TOKEN", "token-of-one-caller")
    async with start_service() as service, start_gateway(service) as gateway:
        command = ["submit", str(file), "-o", str(output), "--url", gateway.url]
        assert await asyncio.to_thread(main, command) == 0
        whole = output.read_text()
        lines = [json.loads(line) for line in whole.splitlines()]
        assert [(line["id"], line["score"]) for line in lines] == [(f"n{i}", float(i % 2)) for i in range(COUNT)]
        output.write_text(whole[: len(whole) // 2])
        assert await asyncio.to_thread(main, command) == 0
        assert output.read_text() == whole
        monkeypatch.setenv("PLAUDIT_TOKEN", "wrong")
        output.unlink()
        assert await asyncio.to_thread(main, command) == 2


def length(server: RedisServer, key: str) -> int:
    import redis

    with redis.Redis.from_url(server.url, password=server.password) as client:
        return int(client.xlen(key))


def lose(server: RedisServer, prefix: str) -> None:
    """Delete everything of a run, as a Redis does that has lost its append-only file."""
    import redis

    with redis.Redis.from_url(server.url, password=server.password) as client:
        client.delete(*client.scan_iter(prefix.replace("[", "\\[") + "*", count=1000))


def pause(server: RedisServer) -> None:
    """Cut all connections and refuse commands for a second, as during a restart."""
    import redis

    with redis.Redis.from_url(server.url, password=server.password) as client:
        client.client_kill_filter(_type="normal", skipme=True)
        client.client_pause(1000)


@pytest.mark.long
@pytest.mark.parametrize("without", ["", "httptools"])
async def test_a_gateway_that_leaves_answers_every_call_until_it_has_left(
    start_service: Any, gateway_process: Any, without: str
) -> None:
    async with (
        start_service(workers=0) as service,
        gateway_process(service, leaves_s=3600, without=without) as gateway,
        gateway.http() as idle,
        gateway.http() as waiting,
        gateway.http() as new,
    ):
        await until(gateway.is_ready, 120)
        kept = await idle.get("/v1/service")
        assert kept.headers.get("connection") != "close"
        scoring = asyncio.create_task(waiting.post("/v1/score", json=samples()[1]))
        await until(lambda: gateway.has_series("plaudit_gateway_awaited 1.0"))
        gateway.terminate()

        async def leaves() -> bool:
            return (await new.get("/v1/service")).headers.get("connection") == "close"

        await until(leaves, 60)  # and accepts connections meanwhile
        last = await idle.get("/v1/service")  # on the connection of the first call
        assert (last.status_code, last.headers["connection"]) == (200, "close")
        async with service.worker():
            answer = await scoring
            assert (answer.json()["outcome"], answer.headers["connection"]) == ("scored", "close")


@pytest.mark.long
async def test_a_gateway_that_leaves_closes_no_connection_that_a_client_keeps(
    start_service: Any, gateway_process: Any
) -> None:
    async with start_service(workers=0) as service, gateway_process(service, leaves_s=1) as gateway:
        await until(gateway.is_ready, 120)
        async with gateway.http() as idle, gateway.http() as another:
            for each in (idle, another):
                assert (await each.get("/v1/service")).status_code == 200
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            gateway.terminate()
            await asyncio.sleep(4)  # longer than it leaves and stays quiet
            last = await idle.get("/v1/service")
            assert (last.status_code, last.headers["connection"]) == (200, "close")
            writer.write(b"GET /livez HTTP/1.1\r\nhost: gateway\r\n\r\n")
            assert b"connection: close" in await reader.read()
            writer.close()
            assert gateway.process.poll() is None
        await until(lambda: gateway.process.poll() is not None)  # as soon as its clients have ended theirs
        assert gateway.process.returncode == 0
