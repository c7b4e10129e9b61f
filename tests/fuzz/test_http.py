"""The doors over HTTP: whatever is sent to gateway and metrics service is answered in time, by its document or 4xx."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from fuzzed_house import WITHIN_S, House
from outside_values import BODIES, TEXTS, VALUES, with_member

HEADERS = {"authorization": "Bearer token-of-one-caller", "x-session-id": "s"}
SAMPLE = {"response": "4", "ground_truth": "4", "data_source": "plain", "prompt": "2 + 2?", "extra_info": {"n": 1}}
ROUTES = {
    "/v1/score": SAMPLE,
    "/v1/groups": {"id": "g", "samples": [SAMPLE, SAMPLE]},
    "/slime": {"prompt": "a", "response": "4", "label": "4"},
    "/openrlhf": {"query": ["a4"], "prompts": ["a"], "labels": ["4"]},
    "/create": {"env_name": "e", "task_spec": {"prompt": "a", "ground_truth": "4"}},
    "/score_group": {
        "candidates": [{"messages": [{"role": "assistant", "blocks": [{"type": "text", "text": "4"}]}]}],
        "task_id": "t",
    },
    "/verify": {"responses_create_params": {"input": "a"}, "response": {"output": []}, "ground_truth": "4"},
}
DOCUMENTS = {"gateway": "/openapi.json", "metrics": "/api/v1/openapi.json"}
once_each = settings(suppress_health_check=list(HealthCheck))


def operations(service: str, url: str, headers: dict[str, str]) -> list[Any]:
    import schemathesis  # here and below, because every process that runs tests reads this file
    from schemathesis.config import SchemathesisConfig

    schema = schemathesis.openapi.from_dict(
        httpx.get(f"{url}{DOCUMENTS[service]}", headers=headers, timeout=WITHIN_S).json(), config=SchemathesisConfig()
    )
    schema.config.base_url = url
    return [found.ok() for found in schema.get_all_operations()]


def check(answer: Any, sent: object) -> None:
    assert answer.status_code < 500 or answer.status_code == 504, (answer.status_code, answer.text[:500], sent)
    if answer.status_code >= 400:
        assert "Traceback" not in answer.text


@pytest.mark.long
@pytest.mark.parametrize("service", ["gateway", "metrics"])
def test_what_a_document_allows_is_answered(house: House, service: str) -> None:
    from schemathesis import GenerationMode

    with house.holding():
        headers = HEADERS if service == "gateway" else {}
        for operation in operations(service, getattr(house, service), headers):
            if operation.path == "/api/v1/events" or "stream" in operation.path:
                continue  # an answer without an end

            @once_each
            @given(operation.as_strategy() | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
            def answers(case: Any) -> None:
                case.headers = {**(case.headers or {}), **headers}
                check(case.call(timeout=WITHIN_S), case)

            answers()


@once_each
@given(st.sampled_from(sorted(ROUTES)), st.data())
def test_what_no_document_allows_is_refused_to_its_sender(house: House, path: str, data: st.DataObject) -> None:
    with house.holding():
        content = data.draw(BODIES | with_member(ROUTES[path]).map(lambda body: json.dumps(body).encode()))
        query = data.draw(
            st.dictionaries(st.sampled_from(["timeout", "wait", "x"]), TEXTS | VALUES.map(str), max_size=1)
        )
        with house.http() as http:
            answer = http.post(
                path, content=content, params={name: value.encode("utf-8", "replace") for name, value in query.items()}
            )
        check(answer, content)


@once_each
@given(
    st.sampled_from(["gateway", "metrics"]),
    st.text(st.characters(min_codepoint=32, max_codepoint=126)),
    st.binary(max_size=40),
)
def test_any_path_and_any_bytes_are_refused(house: House, service: str, path: str, query: bytes) -> None:
    with house.holding():
        try:
            url = httpx.URL(getattr(house, service)).copy_with(raw_path=b"/" + path.encode().replace(b" ", b"%20"))
            answer = httpx.get(url, params={"q": query.hex()}, headers=HEADERS, timeout=WITHIN_S)
        except httpx.InvalidURL:  # of our own client
            reject()
        check(answer, path)
