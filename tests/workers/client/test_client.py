"""The client of a scoring service, against real workers and a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import re
from pathlib import Path
from typing import Any

import pytest

from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.service.client import Result, RewardClient, ServiceError
from plaudit_workers.service.lines import SampleInput
from plaudit_workers.stream.transport import Transport
from waiting import until

GROUP = {"name": "share", "kind": "python", "scope": "group", "python": {"path": "reward.py", "function": "share"}}


def samples(count: int, **fields: Any) -> list[SampleInput]:
    return [SampleInput(response=str(i % 2), ground_truth="1", id=f"n{i}", **fields) for i in range(count)]


async def collect(client: RewardClient) -> dict[tuple[str, int], Result]:
    found: dict[tuple[str, int], Result] = {}
    async for result in client.results():
        assert (result.id, result.index) not in found
        found[result.id, result.index] = result
    return found


async def test_every_sample_gets_one_typed_result(start_service: Any) -> None:
    async with start_service() as service, service.client() as client:
        ids = await client.submit([*samples(4), {"response": "broken"}])
        found = await collect(client)
        assert set(found) == {(own, 0) for own in ids}
        assert [found[f"n{i}", 0].score for i in range(4)] == [0.0, 1.0, 0.0, 1.0]
        broken = found[ids[-1], 0]
        assert (broken.score, broken.outcome) == (None, "data_error")
        assert "on purpose" in str(broken.reason)
        assert found["n1", 0].scorers["right"].value == 1.0
        assert found["n1", 0].seconds >= 0
        assert client.outstanding == 0


async def test_a_group_is_scored_together_and_by_group_scope_scorers(start_service: Any) -> None:
    async with start_service(GROUP) as service, service.client() as client:
        own = await client.submit_group([{"response": "a"}, {"response": "abc"}])
        assert {key: result.score for key, result in (await collect(client)).items()} == {
            (own, 0): 0.25,
            (own, 1): 0.75,
        }
        [alone] = await client.submit([{"response": "x"}])
        assert (await collect(client))[alone, 0].score == 1.0


async def test_more_than_a_session_may_have_in_work_waits_for_room(start_service: Any) -> None:
    async with start_service(workers=0) as service, service.client() as client:
        client._session.room = 8
        submitting = asyncio.create_task(client.submit(samples(30)))
        await asyncio.sleep(0.5)
        assert not submitting.done()
        async with service.worker():
            assert len(await collect(client)) == 30
        assert len(await submitting) == 30


async def test_several_clients_get_their_own(start_service: Any) -> None:
    async with start_service(workers=2) as service, service.client() as one, service.client() as two:
        await asyncio.gather(one.submit(samples(50)), two.submit(samples(20)))
        of_one, of_two = await asyncio.gather(collect(one), collect(two))
        assert (len(of_one), len(of_two)) == (50, 20)


async def test_a_client_that_died_is_followed_by_one_of_the_same_session(start_service: Any) -> None:
    async with start_service() as service:
        seen = []
        with contextlib.suppress(ZeroDivisionError):
            async with service.client(session="nightly") as first:
                await first.submit(samples(10))
                async for result in first.results():
                    seen.append(result.id)
                    assert 1 / (4 - len(seen))  # dies in the middle of handling the fourth
        async with service.client(session="nightly") as second:
            await second.submit(samples(10))  # all again: none is scored again
            found = {own for own, _ in await collect(second)}
        assert found | set(seen[:3]) == {f"n{i}" for i in range(10)}
        assert seen[3] in found
        async with service.client(session="nightly") as third:
            await third.submit(samples(10))
            assert await collect(third) == {}
        transport = await Transport.open(RedisAddress(service.server.url, service.server.password), service.run)
        events = await transport.commands.xrange(transport.names.events)
        await transport.close()
        assert sorted(e[b"group"].split(b":")[2] for _, e in events) == sorted(b"n%d" % i for i in range(10))


async def test_a_result_yielded_before_a_break_is_not_yielded_twice(start_service: Any) -> None:
    async with start_service() as service, service.client(session="breaks") as client:
        await client.submit(samples(5))
        first = await anext(client.results())
        rest = await collect(client)
        assert len(rest) == 4
        assert (first.id, 0) not in rest


async def test_the_older_client_of_a_session_gets_an_error(start_service: Any) -> None:
    async with start_service() as service, service.client(session="same") as old, service.client(session="same") as new:
        with pytest.raises(ServiceError, match="another client has opened the session same"):
            await old.submit(samples(1))
        with pytest.raises(ServiceError, match="another client"):
            await collect_forever(old)
        await new.submit(samples(1))
        assert len(await collect(new)) == 1


async def collect_forever(client: RewardClient) -> None:
    async for _ in client.results(follow=True):
        pass


async def test_samples_that_redis_has_lost_are_submitted_again(start_service: Any) -> None:
    async with start_service(workers=0) as service, service.client() as client:
        await client.submit(samples(6))
        transport = await Transport.open(RedisAddress(service.server.url, service.server.password), service.run)
        await transport.commands.unlink(
            *[key async for key in transport.commands.scan_iter(transport.names.prefix + "*") if b"service" not in key]
        )
        await transport.close()
        async with service.worker():
            assert len(await collect(client)) == 6


async def test_a_worker_that_is_lost_loses_nothing(start_service: Any) -> None:
    async with start_service(workers=0) as service, service.client() as client:
        await client.submit(samples(6))
        transport = await Transport.open(RedisAddress(service.server.url, service.server.password), service.run)
        await transport.commands.xreadgroup("reward", "killed", {transport.names.samples: ">"}, count=3)
        for pending in await transport.commands.xpending_range(transport.names.samples, "reward", "-", "+", 10):
            await transport.commands.xclaim(
                transport.names.samples, "reward", "killed", 0, [pending["message_id"]], idle=60_000
            )
        await transport.close()
        async with service.worker():
            assert len(await collect(client)) == 6


async def test_past_its_deadline_a_sample_is_given_up(start_service: Any) -> None:
    async with start_service(workers=0, groupDeadlineSeconds=0.2) as service, service.client() as client:
        await client.submit(samples(1))
        assert (await collect(client))["n0", 0].outcome == "given_up"


async def test_an_abandoned_session_expires_and_leaves_nothing(start_service: Any) -> None:
    async with start_service(workers=0) as service, service.client() as other:
        with contextlib.suppress(RuntimeError):
            async with service.client(session="gone", keep_s=0.2) as client:
                await client.submit(samples(3))
                raise RuntimeError
        transport = await Transport.open(RedisAddress(service.server.url, service.server.password), service.run)
        while await transport.commands.exists(transport.names.session("gone", "groups")):
            await asyncio.sleep(0.05)
        assert await transport.commands.zcard(transport.names.open) == 0
        assert await transport.commands.hget(transport.names.counters, "abandoned") == b"3"
        await transport.close()
        assert other.outstanding == 0


BAD_INPUT = [
    ({"respons": "x"}, "unknown field `respons`"),
    ({"ground_truth": "x"}, "missing required field `response`"),
    ({"response": "x", "id": "a b"}, "id 'a b': give at most 200 characters without spaces"),
]


@pytest.mark.parametrize(("sample", "words"), BAD_INPUT)
async def test_an_unusable_sample_is_refused_with_its_reason(start_service: Any, sample: Any, words: str) -> None:
    async with start_service(workers=0) as service, service.client() as client:
        with pytest.raises(ServiceError, match=words):
            await client.submit([sample])
        with pytest.raises(ServiceError, match="0 samples: submit 1 to 1024"):
            await client.submit_group([])


async def test_the_same_id_with_another_sample_is_a_conflict(start_service: Any) -> None:
    async with start_service(workers=0) as service, service.client() as client:
        await client.submit([{"response": "1", "id": "x"}])
        await client.submit([{"response": "1", "id": "x"}])
        with pytest.raises(ServiceError, match=r"'x' was submitted in session .* with another sample"):
            await client.submit([{"response": "2", "id": "x"}])


async def test_each_way_not_to_reach_a_service_has_its_message(
    redis_server: RedisServer, start_service: Any, run_name: str
) -> None:
    good = {"password": redis_server.password}
    async with start_service(workers=0) as service:
        trains = await Transport.open(RedisAddress(redis_server.url, redis_server.password), run_name + "-trains")
        cases: list[tuple[str, dict[str, Any], str]] = [
            ("redis://127.0.0.1:1/0", {"run": "x"}, "cannot be reached"),
            (
                redis_server.url,
                {"run": service.run, "password": "wrong"},
                "refuses the password.*PLAUDIT_REDIS_PASSWORD",
            ),
            (redis_server.url, {"run": "nowhere", **good}, rf"no run nowhere.*{service.run}"),
            (redis_server.url, {"run": run_name + "-trains", **good}, "is no scoring service"),
            (redis_server.url, {"job": "others", **good}, "no scoring service of job others"),
            (redis_server.url, {"run": service.run, "session": "a b", **good}, "session 'a b'"),
        ]
        for url, arguments, words in cases:
            with pytest.raises(ServiceError, match=words):
                async with RewardClient(url, **arguments):
                    pass
        async with RewardClient(redis_server.url, job="scores", **good) as client:
            assert client.service.scorers == ["right"]
        await trains.commands.unlink(*[key async for key in trains.commands.scan_iter(trains.names.prefix + "*")])
        await trains.close()


SLOW = {"name": "slow", "kind": "python", "python": {"path": "reward.py", "function": "slow"}, "isolation": "thread"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["ACL SETUSER caller resetpass >second", "CLIENT KILL USER caller"], "refuses the password: .*PASSWORD"),
        (["ACL SETUSER caller -@all"], "refuses user caller a command: .*USERNAME"),
    ],
)
async def test_rights_that_are_lost_end_the_wait_and_no_score_is(
    redis_server: RedisServer, start_service: Any, tmp_path: Path, change: list[str], words: str
) -> None:
    async with start_service(SLOW) as service:
        admin = RedisAddress(redis_server.url, redis_server.password).client(timeout_s=5.0, retries=0)
        await admin.execute_command(*["ACL", "SETUSER", "caller", "on", ">first", "~*", "&*", "+@all"])
        own = {"run": service.run, "username": "caller", "session": "mine"}

        async def lose_the_rights() -> None:
            async with RewardClient(redis_server.url, password="first", **own) as client:
                await client.submit([{"response": "held", "ground_truth": "1"}, {"response": "", "ground_truth": "2"}])
                for command in change:
                    await admin.execute_command(*command.split())
                await collect(client)

        with pytest.raises(ServiceError, match=words):
            await lose_the_rights()
        (tmp_path / "let-go").touch()
        await admin.execute_command(*["ACL", "SETUSER", "caller", "resetpass", ">second", "+@all"])
        async with RewardClient(redis_server.url, password="second", **own) as client:
            assert sorted(result.score or 0.0 for result in (await collect(client)).values()) == [1.0, 2.0]
        await admin.execute_command("ACL", "DELUSER", "caller")
        await admin.aclose()


@pytest.mark.long
async def test_a_client_says_that_it_waits_for_memory(
    start_service: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def reasons() -> list[str]:
        return [getattr(each, "fields", {}).get("reason", "") for each in caplog.records]

    with RedisServer(tmp_path / "redis") as server:
        async with start_service(server=server) as service, service.client() as client:
            admin = RedisAddress(server.url, server.password).client(timeout_s=5.0, retries=0)
            await admin.config_set("maxmemory", 1)
            submitting = asyncio.create_task(client.submit(samples(2)))
            await until(lambda: any(f"the memory of Redis at {server.url} is full" in each for each in reasons()))
            assert not submitting.done()
            await admin.config_set("maxmemory", 0)
            await submitting
            assert len(await collect(client)) == 2
            await admin.aclose()


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"response": "4", "ground_truth": {"n": [2**65]}}, "ground_truth.n[0]: is an integer beyond 64 bits"),
        ({"response": "4", "response_tokens": 2**65}, "response_tokens: is an integer beyond 64 bits"),
        ({"response": "4", "max_tokens": -1}, "max_tokens is -1"),
        ({"response": "4", "finish_reason": "zzz"}, "finish_reason is 'zzz'"),
        ({"response": "4", "extra_info": {"at": object()}}, "extra_info.at: is of type object"),
        ({"response": b"4"}, "response: is bytes"),
        (SampleInput(response="4", ground_truth=2**65), "ground_truth: is an integer beyond 64 bits"),
        (SampleInput(response=5), "response is 5"),  # type: ignore[arg-type]
        ("4", "it is '4'; give a mapping"),
    ],
)
async def test_what_cannot_travel_is_refused_by_name_and_costs_no_other_sample(
    start_service: Any, sample: Any, message: str
) -> None:
    async with start_service() as service, service.client() as client:
        (right,) = await client.submit([{"response": "4", "ground_truth": "4"}])
        with pytest.raises(ServiceError, match=re.escape(message)):
            await client.submit([sample])
        with pytest.raises(ServiceError, match=re.escape(message)):
            await client.submit_group([sample])
        assert [(each.id, each.score) async for each in client.results()] == [(right, 1.0)]


async def test_half_of_a_pair_travels_as_the_replacement_character(start_service: Any) -> None:
    async with start_service() as service, service.client() as client:
        await client.submit([{"id": "a\ud800", "response": "4\ud800", "ground_truth": "4\ufffd"}])
        assert [(each.id, each.score) async for each in client.results()] == [("a\ufffd", 1.0)]
