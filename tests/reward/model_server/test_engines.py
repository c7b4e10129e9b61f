"""Both engines answer alike, and with the logits of plain transformers; the client reads both."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from plaudit_reward.endpoint.served import ModelScorer, ServerPool
from plaudit_reward.scorer import Attempt
from plaudit_wire.errors import DataError
from plaudit_wire.records import Sample

pytestmark = [pytest.mark.engines, pytest.mark.timeout(560)]

Plain = Callable[[str, list[str]], list[list[float]]]

DRAW = random.Random(2)
TEXTS = ["".join(DRAW.choices(string.ascii_letters + " ", k=k)) for k in (1, 5, 90, 2, 256, 33, 34, 180, 35, 120)]


@pytest.fixture(params=["plaudit", "vllm"])
def url(request: pytest.FixtureRequest) -> str:
    """Of a server of each engine."""
    fixture = "server" if request.param == "plaudit" else "vllm_server"
    served: str = request.getfixturevalue(fixture).url
    return served


def classify(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/classify", json=body, timeout=120)


def test_logits_of_mixed_lengths_are_those_of_plain_transformers(url: str, plain_logits: Plain) -> None:
    answer = classify(url, input=TEXTS, use_activation=False).json()
    expected = plain_logits("decoder", TEXTS)
    for item, logits, text in zip(answer["data"], expected, TEXTS, strict=True):
        assert item["probs"] == pytest.approx(logits, abs=1e-4), len(text)
    tokens = sum(map(len, TEXTS))
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == tokens


def test_every_member_of_the_answer_is_there(url: str) -> None:
    answer = classify(url, input="hello").json()
    assert {"id", "object", "created", "model", "data", "usage"} <= answer.keys()
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    (item,) = answer["data"]
    assert (item["index"], item["label"], item["num_classes"]) == (0, "LABEL_0", 1)


def test_the_default_is_the_activation(url: str) -> None:
    (logit,) = classify(url, input="hello", use_activation=False).json()["data"][0]["probs"]
    for body in ({}, {"use_activation": True}):
        (value,) = classify(url, input="hello", **body).json()["data"][0]["probs"]
        assert value == pytest.approx(1 / (1 + math.exp(-logit)), abs=1e-5)


def test_texts_token_ids_and_chats_are_the_same_to_it(url: str) -> None:
    def logits(**body: Any) -> list[float]:
        return [item["probs"][0] for item in classify(url, use_activation=False, **body).json()["data"]]

    text = "u:hi\na:ho\n"
    ids = [string.printable.index(letter) for letter in text]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    (expected,) = logits(input=text)
    assert logits(input=ids) == logits(messages=messages) == pytest.approx([expected], abs=1e-5)
    assert logits(input=[ids, ids]) == logits(input=[text, text]) == pytest.approx([expected, expected], abs=1e-5)


def test_a_text_that_is_too_long_is_refused_not_truncated(url: str) -> None:
    response = classify(url, input="x" * 257)
    assert response.status_code == 400
    assert "256" in response.json()["error"]["message"]


@pytest.mark.parametrize("body", [{}, {"input": 5}, {"input": "x", "model": "other"}])
def test_bad_requests_are_the_clients_fault(url: str, body: dict[str, Any]) -> None:
    assert 400 <= classify(url, **body).status_code < 500


async def test_the_scorers_value_is_the_logit_and_a_long_sample_is_its_own_fault(url: str, plain_logits: Plain) -> None:
    chat, text = ModelScorer(ServerPool("rm", [url])), ModelScorer(ServerPool("rm", [url]), form="text")
    sample = Sample("g", 0, "d", prompt="<u>hi", response="ho", messages=[{"role": "user", "content": "hi"}])
    long = Sample("g", 0, "d", prompt="hi", response="x" * 256)
    expected = plain_logits("decoder", ["u:hi\na:ho\n", "<u>hiho"])
    for scorer, (logit,) in zip((chat, text), expected, strict=True):
        await scorer.open()
        score = await scorer.score(sample, Attempt(60))
        assert (score.outcome, score.value) == ("scored", pytest.approx(logit, abs=1e-4))
        with pytest.raises(DataError, match=r"refused the sample: 400: .*256"):
            await scorer.score(long, Attempt(60))
        await scorer.close()
