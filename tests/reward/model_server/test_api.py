"""What the server refuses, measures and bounds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from plaudit_model_server.api import Access, Address, serve
from plaudit_model_server.batcher import BatchLimits, ModelSettings
from plaudit_model_server.model import Classifier
from plaudit_reward.endpoint.served import ModelScorer, ServerPool
from plaudit_reward.scorer import Attempt
from plaudit_wire.errors import InfrastructureError
from plaudit_wire.records import Sample
from plaudit_workers.launch.redis import free_port

pytestmark = pytest.mark.engines

CHAT = [{"role": "user", "content": "hi"}]
BAD = [
    (b"{", "truncated"),
    (b"[]", "Expected `object`"),
    ({}, "give either input or messages"),
    ({"input": []}, "input is empty"),
    ({"input": ["x", 1]}, "mixes texts, token ids"),
    ({"input": {"x": 1}}, "Expected `str | array | null`"),
    ({"input": ""}, "no tokens"),
    ({"input": [1, 10**6]}, "token ids must be from 0"),
    ({"input": "x", "messages": []}, "give either input or messages"),
    ({"input": "x", "truncate_prompt_tokens": 5}, "unknown field `truncate_prompt_tokens`"),
    ({"input": "x", "model": "other"}, "model 'other' is not served here; this server has 'tiny'"),
    ({"input": ["x"] * 65}, "65 entries, the queue takes 64"),
    ({"messages": [{"content": "no role"}]}, "chat template refuses"),
    *(
        ({"messages": CHAT, "chat_template_kwargs": {name: "{% for i in range(10**12) %}{% endfor %}"}}, "is reserved")
        for name in ("chat_template", "tokenize", "tools", "documents", "messages", "conversation", "padding", "self")
    ),
]


@pytest.mark.parametrize(("body", "words"), BAD)
def test_a_bad_request_gets_an_error_that_names_the_mistake(server: Any, body: Any, words: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = httpx.post(f"{server.url}/classify", content=content, timeout=60)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == 400
    assert words in error["message"]


async def test_a_full_queue_is_answered_with_retry_after(server: Any) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        body = {"input": ["x" * 250] * 60, "use_activation": False}
        answers = await asyncio.gather(*(client.post(f"{server.url}/classify", json=body) for _ in range(8)))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert {answer.status_code for answer in answers} == {200, 429}
    assert {answer.headers["retry-after"] for answer in refused} == {"1"}


async def test_a_request_that_was_given_up_leaves_the_queue(server: Any) -> None:
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
    httpx.post(f"{server.url}/classify", json={"input": ["a", "ab", "abc"]}, timeout=60).raise_for_status()
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    for name in ("queue_wait_seconds", "batch_sequences", "batch_tokens", "inference_seconds"):
        assert float(values[f"plaudit_model_server_{name}_count"]) > 0
    assert float(values["plaudit_model_server_batch_tokens_sum"]) >= 6
    assert float(values['plaudit_model_server_requests_total{code="200"}']) > 0


def test_it_names_its_model(server: Any) -> None:
    (model,) = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", 256)


def test_variables_of_the_models_own_template_are_accepted(server: Any) -> None:
    body = {"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}}
    assert httpx.post(f"{server.url}/classify", json=body, timeout=60).status_code == 200


def test_a_body_beyond_its_limit_is_refused_unread(server: Any) -> None:
    for content in (bytes(5 << 20), (bytes(1 << 20) for _ in range(5))):  # with a length, and in chunks
        response = httpx.post(f"{server.url}/classify", content=content, timeout=60)
        assert response.status_code == 413
        assert "longer than 4194304 bytes" in response.json()["error"]["message"]


async def test_a_token_is_needed_where_the_server_has_one(
    model_folder: Callable[[str], Path], open_model_scorer: Callable[..., Awaitable[ModelScorer]]
) -> None:
    classifier = Classifier(ModelSettings(str(model_folder("decoder")), dtype="float32"))
    stop, port = asyncio.Event(), free_port()
    url, access = f"http://127.0.0.1:{port}", Access(token="hush-hush", body_within_s=0.3)
    serving = asyncio.create_task(
        serve(classifier, Address("127.0.0.1", port, "tiny"), BatchLimits(), stop, access=access)
    )
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        assert (await client.get("/health")).status_code == (await client.get("/metrics")).status_code == 200
        for given in ("", "Bearer", "Bearer wrong", "hush-hush", "Basic hush-hush"):
            headers = {"authorization": given} if given else {}
            for request in (client.get("/v1/models", headers=headers), client.post("/classify", headers=headers)):
                response = await request
                assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
                assert "hush" not in response.text
        good = {"authorization": "Bearer hush-hush"}
        assert (await client.post("/classify", json={"input": "a"}, headers=good)).status_code == 200
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /classify HTTP/1.1\r\nauthorization: Bearer hush-hush\r\ncontent-length: 99\r\n\r\n{")
    assert (await reader.read()).startswith(b"HTTP/1.1 408 ")  # and the connection is closed
    writer.close()
    sample = Sample("g", 0, "d", prompt="2 + 2?", response="4")
    assert (await (await open_model_scorer([url], token="hush-hush")).score(sample, Attempt(30))).outcome == "scored"
    with pytest.raises(InfrastructureError, match=r"responded 401: .* \(set PLAUDIT_MODEL_SERVER_TOKEN") as refusal:
        await (await open_model_scorer([url], token="other")).score(sample, Attempt(30))
    assert "other" not in str(refusal.value)
    stop.set()
    await serving


@pytest.fixture
async def open_model_scorer() -> AsyncIterator[Callable[..., Awaitable[ModelScorer]]]:
    opened: list[ModelScorer] = []

    async def make(places: list[str], **options: Any) -> ModelScorer:
        opened.append(ModelScorer(ServerPool("rm", places, **options)))
        await opened[-1].open()
        while not opened[-1].room():
            await asyncio.sleep(0.01)
        return opened[-1]

    yield make
    for scorer in opened:
        await scorer.close()
