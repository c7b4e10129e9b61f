"""What the server refuses, measures and bounds."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

BAD = [
    (b"{", "truncated"),
    (b"[]", "Expected `object`"),
    ({}, "give input or messages"),
    ({"input": []}, "input is empty"),
    ({"input": ["x", 1]}, "mixes texts, token ids"),
    ({"input": {"x": 1}}, "Expected `str | array | null`"),
    ({"input": ""}, "no tokens"),
    ({"input": [1, 10**6]}, "token ids must be from 0"),
    ({"input": "x", "messages": []}, "one of them"),
    ({"input": "x", "truncate_prompt_tokens": 5}, "unknown field `truncate_prompt_tokens`"),
    ({"input": "x", "model": "other"}, "there is no model 'other' here; this server has 'tiny'"),
    ({"input": ["x"] * 65}, "65 entries, the queue takes 64"),
    ({"messages": [{"content": "no role"}]}, "chat template refuses"),
]


@pytest.mark.parametrize(("body", "words"), BAD)
def test_a_bad_request_is_told_what_is_wrong(server: Any, body: Any, words: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = httpx.post(f"{server.url}/classify", content=content)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == 400
    assert words in error["message"]


async def test_beyond_its_queue_the_server_asks_to_come_again_later(server: Any) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        body = {"input": ["x" * 250] * 60, "use_activation": False}
        answers = await asyncio.gather(*(client.post(f"{server.url}/classify", json=body) for _ in range(8)))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert {answer.status_code for answer in answers} == {200, 429}
    assert {answer.headers["retry-after"] for answer in refused} == {"1"}


async def test_what_nobody_waits_for_is_taken_out_of_the_queue(server: Any) -> None:
    async with httpx.AsyncClient(timeout=0.02) as hasty:
        await asyncio.gather(
            *(hasty.post(f"{server.url}/classify", json={"input": ["x" * 256] * 12}) for _ in range(5)),
            return_exceptions=True,
        )
    async with httpx.AsyncClient(timeout=60) as client:
        while "plaudit_model_server_queue_sequences 0.0" not in (await client.get(f"{server.url}/metrics")).text:
            await asyncio.sleep(0.05)
        while (await client.post(f"{server.url}/classify", json={"input": ["x"] * 64})).status_code == 429:
            await asyncio.sleep(0.05)


def test_queue_batches_and_inference_are_measured_apart(server: Any) -> None:
    httpx.post(f"{server.url}/classify", json={"input": ["a", "ab", "abc"]}).raise_for_status()
    text = httpx.get(f"{server.url}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    for name in ("queue_wait_seconds", "batch_sequences", "batch_tokens", "inference_seconds"):
        assert float(values[f"plaudit_model_server_{name}_count"]) > 0
    assert float(values["plaudit_model_server_batch_tokens_sum"]) >= 6
    assert float(values['plaudit_model_server_requests_total{code="200"}']) > 0


def test_it_names_its_model(server: Any) -> None:
    (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", 256)
