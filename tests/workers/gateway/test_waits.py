"""What was accepted is scored, and what was scored is found: after a timeout, a disconnect, a deletion, lost data."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.service import callers
from plaudit_workers.service.callers import Limits
from scoring_service import Running
from stepped_clock import SteppedClock
from waiting import until

RIGHT = {"response": "4", "ground_truth": "4"}
OTHER = "token-of-another-caller"


def named(prefix: str, count: int) -> dict[str, Any]:
    return {"samples": [{"id": f"{prefix}{i}", **RIGHT} for i in range(count)]}


async def statuses(http: Any, prefix: str, count: int) -> set[int]:
    return {(await http.get(f"/v1/scores/{prefix}{i}")).status_code for i in range(count)}


async def accepted(http: Any, prefix: str, count: int) -> bool:
    return await statuses(http, prefix, count) == {202}


async def test_what_waits_for_room_is_scored_after_a_timeout_and_a_disconnect(
    start_service: Any, start_gateway: Any
) -> None:
    count = 40
    async with (
        start_service(workers=0) as service,
        start_gateway(service, room=4) as gateway,
        gateway.http() as http,
    ):
        late = await http.post("/v1/score?timeout=0.2", json=named("late", count))
        assert late.status_code == 504
        assert "the scores wait under the ids (late0, late1, late2, …)" in late.json()["error"]["message"]
        leaving = asyncio.create_task(http.post("/v1/score", json=named("left", count)))
        await until(lambda: accepted(http, "left", count))
        leaving.cancel()
        without_ids = await http.post("/v1/score?timeout=0.2", json={"samples": [RIGHT] * 3})
        assert "the scores of samples without an id are dropped" in without_ids.json()["error"]["message"]
        assert await statuses(http, "late", count) == await statuses(http, "left", count) == {202}
        async with service.worker():
            assert (await http.get(f"/v1/scores/left{count - 1}?wait=60")).json()["score"] == 1.0
            assert await statuses(http, "late", count) == await statuses(http, "left", count) == {200}
        awaited = (await http.get("/v1/service")).json()["health"]["awaited"]
        assert awaited == 0


async def test_a_result_that_goes_before_it_is_fetched_is_scored_again(
    start_service: Any, start_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers, "_DELIVERED_KEPT_S", 0.0)
    monkeypatch.setattr(callers, "UPKEEP_EVERY_S", 0.01)
    async with (
        start_service() as service,
        start_gateway(service) as one,
        start_gateway(service) as two,
        one.http() as first,
        two.http() as second,
    ):

        async def repeat(number: int) -> None:
            for turn in range(25):
                http = (first, second)[(number + turn) % 2]
                answer = await http.post("/v1/score?timeout=25", json={"id": f"n{turn % 3}", **RIGHT})
                assert answer.status_code == 200, answer.text

        await asyncio.gather(*map(repeat, range(8)))


async def test_another_sample_under_the_id_never_gets_its_result(start_service: Any, start_gateway: Any) -> None:
    async with (
        start_service(workers=0) as service,
        start_gateway(service) as one,
        start_gateway(service, room=1) as two,
        one.http() as first,
        two.http() as second,
    ):
        blocking = asyncio.create_task(first.post("/v1/score", json={"id": "a", **RIGHT}))
        while (await first.get("/v1/scores/a")).status_code == 404:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        others = {"id": "b", "response": "5", "ground_truth": "4"}
        right = asyncio.create_task(first.post("/v1/score", json={"id": "b", **RIGHT}))
        wrong = asyncio.create_task(second.post("/v1/score", json=others))
        async with service.worker():
            answers = [await right, await wrong]
            await blocking
        assert sorted(answer.status_code for answer in answers) == [200, 409]


async def test_lost_groups_are_queued_once(start_service: Any, start_gateway: Any) -> None:
    count = 60
    async with (
        start_service(workers=0) as service,
        start_gateway(service, room=8, limits=Limits(queued=count + 8)) as gateway,
        gateway.http() as http,
    ):
        scoring = asyncio.create_task(http.post("/v1/score", json=named("n", count)))
        await until(lambda: scoring.done() or length(service) >= 8)
        lose(service)
        await until(lambda: length(service) >= 8)  # the session is open again, and its first groups are back
        lose(service)
        await until(lambda: length(service) >= 8)
        assert (await http.post("/v1/score?timeout=0", json=RIGHT)).status_code == 504  # not 429: no more is queued
        async with service.worker():
            assert len((await scoring).json()["results"]) == count


@pytest.mark.long
async def test_delivered_results_make_room_before_anybody_waits(
    start_service: Any, start_gateway: Any, tmp_path: Path
) -> None:
    big = {"name": "right", "kind": "python", "python": {"path": "reward.py", "function": "long"}}
    with RedisServer(tmp_path / "redis", max_memory_bytes=24 << 20) as small:
        async with (
            start_service({**big, "isolation": "thread"}, server=small) as service,
            start_gateway(service) as gateway,
            gateway.http() as http,
            gateway.http(OTHER) as other,
        ):
            for batch in range(16):
                body = {"samples": [{"id": f"{batch}-{i}", **RIGHT} for i in range(400)]}
                assert (await http.post("/v1/score?timeout=25", json=body)).status_code == 200
            assert (await other.post("/v1/score?timeout=25", json=RIGHT)).status_code == 200
            memory = (await http.get("/v1/service")).json()["health"]["memory"]
            assert memory["share"] < memory["most"] == 0.7


async def test_names_of_one_token_share_its_room(start_service: Any, start_gateway: Any) -> None:
    room = 8
    async with (
        start_service(workers=0) as service,
        start_gateway(service, room=room) as gateway,
        gateway.http() as http,
        gateway.http(OTHER) as other,
    ):
        asked = [
            asyncio.create_task(
                http.post("/v1/score", json=named(f"{name}-", 30), headers={"plaudit-caller": f"run-{name}"})
            )
            for name in range(4)
        ]
        await until(lambda: length(service) == room)
        innocent = asyncio.create_task(other.post("/v1/score", json=RIGHT))
        await until(lambda: length(service) == room + 1)
        async with service.worker():
            assert (await innocent).status_code == 200
            assert {(await answer).status_code for answer in asked} == {200}


async def test_two_gateways_go_on_when_redis_has_lost_the_session(start_service: Any, start_gateway: Any) -> None:
    async with (
        start_service() as service,
        start_gateway(service) as one,
        start_gateway(service) as two,
        one.http() as first,
        two.http() as second,
    ):
        for turn in range(3):
            for number, http in enumerate((first, second)):
                answer = await http.post("/v1/score?timeout=25", json={"id": f"{turn}-{number}", **RIGHT})
                assert answer.status_code == 200
            lose(service)


@pytest.mark.skipif(not SteppedClock.available(), reason="needs a C compiler")
@pytest.mark.parametrize("step_s", [5000.0, -5000.0])
async def test_a_step_of_the_clock_gives_up_no_group(
    start_service: Any, start_gateway: Any, tmp_path: Path, step_s: float
) -> None:
    clock = SteppedClock(tmp_path)
    server = RedisServer(tmp_path / "stepped")
    with clock.preloaded():
        server.start()
    try:
        async with (
            start_service(workers=0, server=server) as service,
            start_gateway(service) as gateway,
            gateway.http() as http,
        ):
            scoring = asyncio.create_task(http.post("/v1/score", json=named("n", 20)))
            await until(lambda: length(service) == 20)
            await until(lambda: looked(service) is not None)
            clock.step(step_s)
            before = looked(service)
            await until(lambda: looked(service) != before)
            async with service.worker():
                assert {each["score"] for each in (await scoring).json()["results"]} == {1.0}
    finally:
        server.stop()


def length(service: Running) -> int:
    with client(service) as redis:
        return int(redis.xlen(f"plaudit:{{{service.run}}}:samples"))


def looked(service: Running) -> Any:
    with client(service) as redis:
        return redis.hget(f"plaudit:{{{service.run}}}:leases", "looked")


def lose(service: Running) -> None:
    """Delete everything of a run, as a Redis does that has lost its append-only file."""
    with client(service) as redis:
        redis.delete(*redis.scan_iter(f"plaudit:{{{service.run}}}:*", count=1000))


def client(service: Running) -> Any:
    import redis

    return redis.Redis.from_url(service.server.url, password=service.server.password)
