"""A server of either engine sleeps and wakes at the request of the process that started it, and of nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from plaudit_workers.launch.child_server import ServerDiedError
from plaudit_workers.launch.served_models import ServerClient

TEXTS = ["a text that waits", "another one"]

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", ["server", "vllm_server"])
async def test_what_arrives_in_its_sleep_waits_and_gets_the_same_logits(
    name: str, request: pytest.FixtureRequest, plain_logits: Callable[[str, list[str]], list[list[float]]]
) -> None:
    server: Any = request.getfixturevalue(name)
    client = ServerClient(server.url, server.sleep_token)
    async with httpx.AsyncClient(timeout=None) as http:
        for _ in range(2):
            await client.sleep()
            await client.sleep()  # a second time changes nothing
            body = {"input": TEXTS, "use_activation": False}
            waiting = asyncio.create_task(http.post(f"{server.url}/classify", json=body))
            await asyncio.sleep(0.5)
            assert await client.healthy()
            assert not waiting.done()
            await client.wake_up()
            data = (await waiting).json()["data"]
            logits = [each["probs"] for each in data]
            assert logits == [pytest.approx(each, abs=1e-4) for each in plain_logits("decoder", TEXTS)]
    await client.close()


@pytest.mark.parametrize("name", ["server", "vllm_server"])
async def test_nobody_else_makes_it_sleep(name: str, request: pytest.FixtureRequest) -> None:
    server: Any = request.getfixturevalue(name)
    async with httpx.AsyncClient(timeout=None) as http:
        for headers in ({}, {"Authorization": "Bearer a guess"}):
            for route in ("sleep", "wake_up"):
                assert (await http.post(f"{server.url}/{route}", headers=headers)).status_code == 404
        answer = await http.post(f"{server.url}/classify", json={"input": TEXTS[0]})
    assert answer.status_code == 200
    client = ServerClient(server.url, "")
    with pytest.raises(ServerDiedError, match=r"/sleep: the engine responded 404"):
        await client.sleep()
    await client.close()
