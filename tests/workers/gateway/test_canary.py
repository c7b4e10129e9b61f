"""A canary: another service that gets copies of samples and is compared, and never answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

import faulty_server as faults
from faulty_server import Reply

TOKEN = "token-of-one-caller"
SECRET = {"name": "canary", "key": "client"}


@pytest.fixture
async def other(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """Another service, which finds every answer right; it has no score for an empty one, and fails for ``down``."""

    def reply(request: Any, _: int) -> Reply:
        response = request.body["response"]
        if response == "down":
            return Reply(status=503)
        scored = response != ""
        outcome = "scored" if scored else "data_error"
        return Reply(body={"score": 1.0 if scored else None, "outcome": outcome, "seconds": 2.0, "version": "next"})

    monkeypatch.setenv("PLAUDIT_SECRET_CANARY_CLIENT", "token-of-the-canary")
    server = faults.FaultyServer("/v1/score")
    server.reply = reply
    await server.start()
    yield server
    await server.stop()


def canary(server: Any, share: float) -> dict[str, Any]:
    return {"canary": {"service": {"url": server.origin, "tokenSecret": SECRET}, "share": share}}


async def test_copies_are_compared_and_callers_get_the_services_own_scores(
    start_service: Any, start_gateway: Any, other: Any
) -> None:
    responses = ["4", "4", "5", "", "down"]
    samples = [{"response": response, "ground_truth": "4", "id": f"s{i}"} for i, response in enumerate(responses)]
    async with start_service(gateway=canary(other, 1.0)) as service, start_gateway(service) as gateway:
        async with gateway.http() as http:
            results = (await http.post("/v1/score", json={"samples": samples})).json()["results"]
            assert [result["score"] for result in results] == [1.0, 1.0, 0.0, 0.0, 0.0]
            async with asyncio.timeout(10):
                while sum((compared := await comparison(http))["samples"].values()) < len(samples):
                    await asyncio.sleep(0.01)
            assert compared["samples"] == {"equal": 2, "different": 1, "only_here": 1, "unavailable": 1}
            assert (compared["agreement"], compared["versions"]) == (pytest.approx(2 / 3), ["next"])
            assert (compared["mean_difference"], compared["mean_seconds"]) == (pytest.approx(1 / 3), 2.0)
            page = (await http.get("/metrics")).text
        assert 'plaudit_gateway_canary_samples_total{result="equal",version="next"} 2.0' in page
        assert {request.headers["authorization"] for request in other.requests} == {"Bearer token-of-the-canary"}
        assert all("id" not in request.body for request in other.requests)


async def test_a_group_is_copied_as_a_whole(
    start_service: Any, start_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAUDIT_SECRET_CANARY_CLIENT", TOKEN)
    share = {"name": "share", "kind": "python", "scope": "group", "python": {"path": "reward.py", "function": "share"}}
    samples = [{"response": "a" * length} for length in (1, 3)]
    async with start_service(share) as other_service, start_gateway(other_service) as there:
        spec = {"canary": {"service": {"url": there.url, "tokenSecret": SECRET}, "share": 1.0}}
        async with (
            start_service(share, gateway=spec) as service,
            start_gateway(service) as gateway,
            gateway.http() as http,
        ):
            answer = (await http.post("/v1/groups", json={"id": "g", "samples": samples})).json()
            assert [result["score"] for result in answer["results"]] == [0.25, 0.75]
            async with asyncio.timeout(10):
                while sum((compared := await comparison(http))["samples"].values()) < len(samples):
                    await asyncio.sleep(0.01)
    assert compared["samples"] == {"equal": 2}  # scored alone, both would be 1


async def test_about_the_share_is_copied_and_a_repeated_request_draws_the_same(
    start_service: Any, start_gateway: Any, other: Any
) -> None:
    samples = [{"response": str(i), "ground_truth": "4", "id": f"s{i}"} for i in range(400)]
    async with start_service(gateway=canary(other, 0.25)) as service, start_gateway(service) as gateway:
        counts = []
        for _ in range(2):
            async with gateway.http() as http:
                await http.post("/v1/score", json={"samples": samples})
            await until_quiet(other)
            counts.append(len(other.requests) - sum(counts))
        assert counts[0] == counts[1]
        assert 60 < counts[0] < 140


async def comparison(http: httpx.AsyncClient) -> dict[str, Any]:
    found: dict[str, Any] = (await http.get("/v1/service")).json()["canary"]
    return found


async def until_quiet(server: Any) -> None:
    before = -1
    while len(server.requests) != before or not before:
        before = len(server.requests)
        await asyncio.sleep(0.2)
