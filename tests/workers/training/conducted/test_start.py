"""A trainer that starts, takes the run over and closes steps while its connections to Redis break."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from bad_network import BadNetwork
from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.stream.transport import Transport
from simulated_run import Simulation, make_plan

AWAY_S = 0.05


class OneTry(Simulation):
    """Plain commands are not sent again by the connection, so that a short outage counts as a long one."""

    async def open(self) -> Transport:
        transport = await super().open()
        await transport.commands.aclose(close_connection_pool=True)
        transport.commands = self.address.client(timeout_s=2.0, retries=0)
        return transport


async def test_connections_may_break_at_any_command_of_a_trainer_from_its_start_on(
    redis_server: RedisServer, run_name: str, tmp_path: Path
) -> None:
    simulation = OneTry(redis_server, run_name, tmp_path)
    left = [
        b"TIME",
        b"_take_over",
        b"ZRANGE",
        b"HGETALL",
        b"_announce",
        b"_take_ready",
        b"HMGET",
        b"_close",
        b"_record",
    ]
    async with simulation.workers(), BadNetwork(redis_server.port) as network:
        await asyncio.sleep(0.1)  # the workers connect without that network

        def break_first(message: bytes) -> None:
            for command in [each for each in left if each in message]:
                left.remove(command)
                network.cut()
                asyncio.get_running_loop().call_later(AWAY_S, network.restore)

        simulation.port, network.on_message = network.port, break_first
        done, policy = await asyncio.wait_for(simulation.train(make_plan(steps=2, prompts_per_step=2)), 30)
    assert done
    assert not left
    assert sorted(int(group.split("-")[1]) for update in policy.trained for group in update) == list(range(4))


async def test_a_process_starts_once_the_name_of_redis_resolves(
    redis_server: RedisServer, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    resolve, resolves = loop.getaddrinfo, False

    async def resolved(host: Any, *more: Any, **options: Any) -> Any:
        return await resolve("127.0.0.1" if resolves and host == "redis.invalid" else host, *more, **options)

    monkeypatch.setattr(loop, "getaddrinfo", resolved)
    address = RedisAddress(f"redis://redis.invalid:{redis_server.port}/0", redis_server.password)
    opening = asyncio.create_task(Transport.open(address, run_name, stop=asyncio.Event()))
    await asyncio.sleep(0.2)
    assert not opening.done()
    resolves = True
    await (await asyncio.wait_for(opening, 10)).close()
