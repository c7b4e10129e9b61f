"""One address for several servers, over real HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from plaudit_reward.endpoint.served import LocalRouter, ServerPool

Servers = Callable[[int], Awaitable[list[Any]]]
Open = Callable[..., Awaitable[httpx.AsyncClient]]


@pytest.fixture
async def open_router() -> AsyncIterator[Open]:
    """Opens a router over servers; gives a client of its address."""
    opened: list[Any] = []

    async def make(urls: list[str], *, wait: bool = True, limit_s: float = 10.0) -> httpx.AsyncClient:
        router = LocalRouter(ServerPool("grades", urls, token="hush"), limit_s)
        client = httpx.AsyncClient(base_url=f"http://{await router.open()}", timeout=30.0)
        opened.append((router, client))
        while wait and not router.ready:
            await asyncio.sleep(0.01)
        return client

    yield make
    for router, client in opened:
        await client.aclose()
        await router.close()


async def test_a_request_arrives_at_a_server_and_its_answer_at_the_caller(servers: Servers, open_router: Open) -> None:
    (server,) = await servers(1)
    server.reply = (400, {"Content-Type": "application/problem+json"}, b'{"detail": "too long"}')
    response = await (await open_router([server.url])).post("/v1/chat/completions?a=1", json={"model": "x"})
    assert (response.status_code, response.json()) == (400, {"detail": "too long"})
    assert response.headers["content-type"] == "application/problem+json"
    assert [json.loads(body) for body in server.bodies] == [{"model": "x"}]


async def test_callers_are_spread_over_servers_and_a_dead_one_is_left_out(servers: Servers, open_router: Open) -> None:
    both = await servers(2)
    together = asyncio.Event()

    async def answer(body: bytes) -> tuple[int, dict[str, str], bytes]:
        if all(server.bodies for server in both):
            together.set()
        await together.wait()
        return 200, {}, b"{}"

    for server in both:
        server.answer = answer
    client = await open_router([server.url for server in both])
    while len((await client.get("/health")).content) or not all(server.probes for server in both):
        await asyncio.sleep(0.01)
    first = await asyncio.gather(*(client.post("/v1/completions", json={}) for _ in range(8)))
    assert {response.status_code for response in first} == {200}
    dead, alive = both
    await dead.stop()
    seen, statuses = len(alive.bodies), []
    while statuses[-8:] != [200] * 8:
        statuses.append((await client.post("/v1/completions", json={})).status_code)
    assert set(statuses) <= {200, 502}
    assert len(alive.bodies) - seen >= 8


async def test_without_a_healthy_server_the_caller_gets_a_502_that_says_so(open_router: Open) -> None:
    client = await open_router(["http://127.0.0.1:9"], wait=False, limit_s=0.3)
    response = await client.post("/v1/chat/completions", json={})
    assert response.status_code == 502
    message = "none of 1 servers of the model of scorer grades is healthy"
    assert response.json() == {"error": {"type": "router", "message": message}}
    assert (await client.delete("/v1/models")).status_code == 405


async def test_a_server_that_hangs_is_a_504(servers: Servers, open_router: Open) -> None:
    (server,) = await servers(1)
    hangs = asyncio.Event()

    async def answer(body: bytes) -> None:
        await hangs.wait()

    server.answer = answer
    response = await (await open_router([server.url], limit_s=0.3)).post("/v1/completions", json={})
    hangs.set()
    assert response.status_code == 504
