"""The libraries of functions: who loads them, and what a process does without them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from plaudit_reward.endpoint.budget import BUDGET, BudgetReport, RateLimits, RedisBudget
from plaudit_wire.errors import RefusedError
from plaudit_wire.records import WorkerRecord
from plaudit_wire.redis import FunctionLibrary, RedisAddress
from plaudit_wire.redis_access import ADMIN, acl_file
from plaudit_workers.launch.redis import RedisServer, ServerAccess
from plaudit_workers.stream.calls import beat, open_streams
from plaudit_workers.stream.libraries import Scripts, libraries
from plaudit_workers.stream.transport import Transport
from stream_protocol.own_redis import OwnRedis
from waiting import until

RUN = "libraries-1"
LIBRARY = Scripts().library
RECORD = WorkerRecord("reward-0", "reward")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[OwnRedis]:
    """A Redis without functions. ``admin`` and ``reward`` are users of a run, ``narrow`` and ``wide`` are not."""
    own = (
        "user wide reset on nopass ~plaudit:* +@all -@dangerous +info\nuser narrow reset on nopass ~* +@all -function\n"
    )
    (tmp_path / "users.acl").write_text(acl_file(RUN, {ADMIN: "word", "reward": "word"}) + own)
    with OwnRedis(tmp_path, "port {port}", f'aclfile "{tmp_path / "users.acl"}"') as server:
        yield server


def address(server: OwnRedis, user: str) -> RedisAddress:
    return RedisAddress(f"redis://127.0.0.1:{server.port}/0", "word", user)


def load(server: OwnRedis, *loaded: FunctionLibrary) -> None:
    with Redis(port=server.port, username=ADMIN, password="word") as admin:
        for library in loaded:
            admin.function_load(library.text)


async def test_a_role_waits_until_the_functions_are_loaded(server: OwnRedis, caplog: pytest.LogCaptureFixture) -> None:
    def refusals() -> int:
        messages = [record.getMessage() for record in caplog.records]
        return messages.count("Redis refuses commands for now; retrying")

    opening = asyncio.create_task(Transport.open(address(server, "reward"), RUN, stop=asyncio.Event()))
    await until(lambda: refusals() == 1)
    assert not opening.done()
    load(server, *libraries())
    transport = await asyncio.wait_for(opening, 60)
    with Redis(port=server.port, username=ADMIN, password="word") as admin:
        admin.flushall()
        await transport.recreate_groups()  # FLUSHALL leaves functions
        admin.function_flush()
    lost = asyncio.create_task(transport.scripts.run(open_streams(lost=True)))
    await until(lambda: refusals() == 2)
    assert not lost.done()
    load(server, *libraries())
    await asyncio.wait_for(lost, 60)
    await transport.close()
    assert refusals() == 2


async def test_a_judges_budget_waits_for_its_functions_too(server: OwnRedis) -> None:
    client = address(server, "reward").client(timeout_s=5.0, retries=0)
    budget = RedisBudget(client, f"plaudit:{{{RUN}}}:limits:judge", "reward-0", RateLimits(requests=2))
    with pytest.raises(ConnectionError, match=BUDGET.name):
        await budget.exchange(BudgetReport(0))
    load(server, BUDGET)
    await budget.exchange(BudgetReport(0))
    await budget.close()


async def test_a_user_with_permission_loads_missing_functions(server: OwnRedis) -> None:
    transport = await Transport.open(address(server, "wide"), RUN)
    with Redis(port=server.port, username=ADMIN, password="word") as admin:
        admin.flushall()
        admin.function_flush()
        await asyncio.wait_for(transport.recreate_groups(), 10)
        assert [each[1].decode() for each in admin.function_list()] == [LIBRARY.name]
    await transport.close()


@pytest.mark.parametrize("user", ["wide", "reward"])
async def test_a_redis_that_restarts_with_its_file_still_has_them(tmp_path: Path, user: str) -> None:
    own = "user wide reset on nopass ~plaudit:* +@all -@dangerous +info\n"
    (tmp_path / "users.acl").write_text(acl_file(RUN, {ADMIN: "word", "reward": "word"}) + own)
    lines = ("port {port}", "appendonly yes", "appendfsync always", f'aclfile "{tmp_path / "users.acl"}"')
    with OwnRedis(tmp_path, *lines) as server:
        load(server, *libraries())
        transport = await Transport.open(address(server, user), RUN)
        await transport.scripts.run(beat(RECORD))
        server.kill()
        beating = asyncio.create_task(transport.scripts.run(beat(RECORD)))
        await asyncio.sleep(0.1)
        assert not beating.done()
        with server:
            await asyncio.wait_for(beating, 30)
            with Redis(port=server.port, username=ADMIN, password="word") as admin:
                assert {each[1].decode() for each in admin.function_list()} == {library.name for library in libraries()}
                assert admin.zrange(transport.names.workers, 0, -1) == [b"reward-0"]
            await transport.close()


async def test_a_user_without_permission_on_an_external_redis_is_refused_with_the_rule_to_add(server: OwnRedis) -> None:
    rules = re.escape("+@all -@dangerous +info +fcall +function|load")
    with pytest.raises(RefusedError, match=rf"lacks the functions {LIBRARY.name}.* these rules: ~plaudit:.*{rules}"):
        await Transport.open(address(server, "narrow"), RUN, stop=asyncio.Event())


async def test_two_versions_of_the_code_live_side_by_side(server: OwnRedis) -> None:
    newer = Scripts({"beat": Scripts().files["beat"] + "-- newer\n"})
    assert newer.library.name != LIBRARY.name
    first = await Transport.open(address(server, "wide"), RUN)
    second = await Transport.open(address(server, "wide"), RUN, scripts=newer)
    for transport in (first, second, first):
        await transport.recreate_groups()
        assert await transport.commands.xlen(transport.names.samples) == 0
    for transport in (first, second):
        await transport.close()


def test_a_redis_of_plaudit_run_loads_them_even_if_its_data_is_gone(tmp_path: Path) -> None:
    users = ServerAccess("word", acl_file(RUN, {ADMIN: "word"}))
    with RedisServer(tmp_path, access=users) as server:
        server.kill()
        for file in (tmp_path / "appendonlydir").iterdir():
            file.unlink()
        server.start()
        with Redis(port=server.port, username=ADMIN, password="word") as admin:
            assert {each[1].decode() for each in admin.function_list()} == {library.name for library in libraries()}
