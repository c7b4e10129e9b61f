"""What a gateway refuses for now, and TLS."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from plaudit_client import RewardClient
from plaudit_workers.service.callers import Limits
from plaudit_workers.service.tokens import SampleRate
from stream_protocol.secure_redis import Authority

RIGHT = {"response": "4", "ground_truth": "4"}


def test_a_bucket_refills_and_each_caller_has_its_own():
    now = [0.0]
    rate = SampleRate(60, clock=lambda: now[0])
    assert rate.take("one", 25) == 0  # more than the burst of 10 s: admitted whole, and then owed
    assert rate.take("one", 1) == pytest.approx(15)
    assert rate.take("other", 1) == 0
    now[0] = 14.0
    assert rate.take("one", 1) > 0
    now[0] = 16.0
    assert rate.take("one", 1) == 0


def test_over_time_no_more_is_admitted_than_the_rate_and_one_burst():
    now = [0.0]
    rate = SampleRate(600, clock=lambda: now[0])
    admitted = 0
    for _ in range(6000):
        now[0] += 0.01
        admitted += rate.take("one", 3) == 0
    assert 600 <= admitted * 3 <= 600 + 100 + 3


async def test_a_token_beyond_its_rate_gets_429_and_another_does_not(start_service: Any, start_gateway: Any) -> None:
    async with (
        start_service(gateway={"samplesPerMinute": 60}) as service,
        start_gateway(service) as gateway,
        gateway.http() as one,
        gateway.http("token-of-another-caller") as other,
    ):
        assert (await one.post("/v1/score", json={"samples": [RIGHT] * 100})).status_code == 200
        refused = await one.post("/v1/score", json=RIGHT)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate")
        assert 30 <= int(refused.headers["retry-after"]) <= 91
        assert (await other.post("/v1/score", json=RIGHT)).status_code == 200


async def test_a_full_queue_gets_429_and_empties(start_service: Any, start_gateway: Any) -> None:
    samples = {"samples": [RIGHT] * 20}
    async with (
        start_service(workers=0) as service,
        start_gateway(service, limits=Limits(queued=5), room=1) as gateway,
        gateway.http() as http,
    ):
        waiting = asyncio.create_task(http.post("/v1/score", json=samples))
        while (refused := await http.post("/v1/score?timeout=0", json=RIGHT)).status_code != 429:
            await asyncio.sleep(0.01)
        assert (refused.json()["error"]["type"], refused.headers["retry-after"]) == ("busy", "1")
        async with service.worker():
            assert [each["score"] for each in (await waiting).json()["results"]] == [1.0] * 20
            assert (await http.post("/v1/score", json=RIGHT)).status_code == 200


async def test_a_gateway_with_a_certificate_serves_clients_that_trust_its_authority(
    start_service: Any, start_gateway: Any, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "pki").start()
    certificate, key = authority.sign("gateway", "127.0.0.1")
    async with start_service() as service, start_gateway(service, certificate=certificate, key=key) as gateway:
        async with RewardClient(gateway.url, "token-of-one-caller", ca_file=authority.ca) as client:
            assert (await client.score(RIGHT)).score == 1.0
        async with httpx.AsyncClient() as stranger:
            with pytest.raises(httpx.ConnectError, match="certificate"):
                await stranger.get(f"{gateway.url}/v1/service")
