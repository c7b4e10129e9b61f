"""Whatever a caller sends is answered in time, by a score or a typed 4xx, and nobody else is affected."""

from __future__ import annotations

import asyncio
import contextlib
import json
from functools import partialmethod
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from plaudit_metrics.service import http_server
from plaudit_reward.endpoint.shapes import GATEWAY_SHAPES
from plaudit_wire.messages import decode
from plaudit_wire.plain import plain_text
from plaudit_wire.records import Sample
from plaudit_workers.service import gateway as gateway_module
from plaudit_workers.service.gateway import Strangers
from plaudit_workers.service.requests import (
    BodyRoom,
    RefusedRequestError,
    RequestBody,
    read_candidates,
    read_groups,
    read_samples,
    read_shape,
    read_task,
)
from plaudit_workers.stream.sessions import encoded_group
from waiting import until

RIGHT = {"response": "4", "ground_truth": "4"}
OTHER = "token-of-another-caller"
BIG = b"36893488147419103232"
BAD = [
    ("/v1/score", b'{"response":"4","ground_truth":' + BIG + b"}", "ground_truth: is an integer beyond 64 bits"),
    ("/v1/score", b'{"response":"4","extra_info":{"n":[1,' + BIG + b"]}}", "extra_info.n[1]: is an integer beyond"),
    ("/v1/score", b'{"response":"4","prompt":[{"content":' + BIG + b"}]}", "prompt[0].content: is an integer beyond"),
    ("/v1/score", b'{"response":"4","response_tokens":' + BIG + b"}", "response_tokens: is an integer beyond 64 bits"),
    (
        "/v1/score",
        b'{"response":"4","response_tokens":18446744073709551615}',
        "response_tokens is 18446744073709551615",
    ),
    ("/v1/score", b'{"response":"4","max_tokens":-1}', "max_tokens is -1: Expected `int` >= 0"),
    ("/v1/score", b'{"response":"4","finish_reason":"zzz"}', "finish_reason is 'zzz'"),
    ("/v1/score", b'{"response":"4","ground_truth":1e999}', "ground_truth: holds a number beyond"),
    ("/v1/score", b'{"response":"4","ground_truth":NaN}', "not JSON"),
    ("/v1/score", b'{"response":"\\ud800","max_tokens":-1}', "max_tokens is -1"),
    ("/slime", b'{"response":"\xed\xa0\x80","metadata":[1]}', "extra_info: is [1]; give a mapping"),
    ("/v1/score", b"\xff", "not JSON"),
    (
        "/v1/score",
        b'{"response":"caf\xe9"}',
        "response: holds text that is not UTF-8 (b'caf\\xe9'); encode it as UTF-8",
    ),
    ("/v1/score", b'{"resp\xe9":"4"}', "the body: holds text that is not UTF-8"),
    (
        "/v1/groups",
        b'{"samples":[{"response":"4","extra_info":{"a":"\xff"}}]}',
        "extra_info: holds text that is not UTF",
    ),
    ("/v1/groups", b'{"id":"\xff","samples":[{"response":"4"}]}', "the body: holds text that is not UTF-8"),
    ("/slime", b'{"response":"\xff"}', "holds text that is not UTF-8"),
    ("/v1/score", b'{"a":' + b"[" * 100_000, "nested too deeply"),
    ("/v1/score", b'{"response":"4","extra_info":' + b'{"a":' * 70 + b"1" + b"}" * 71, "extra_info.a.a"),
    ("/v1/score", b'{"response":"4","extra_info":' + b'{"a":' * 990 + b"1" + b"}" * 991, "nested too deeply"),
    ("/v1/score", b'{"samples":[{"response":"4"},{"response":"4","ground_truth":' + BIG + b"}]}", "samples[1]: ground"),
    ("/v1/groups", b'{"samples":[{"response":"4","extra_info":{"a":' + BIG + b"}}]}", "extra_info.a: is an integer"),
    ("/v1/groups", b'{"groups":[{"samples":[{"response":"4","max_tokens":-1}]}]}', "max_tokens is -1"),
    ("/v1/groups", b'{"samples":5}', "Expected `array`, got `int`"),
    ("/slime", b'{"response":"4","label":' + BIG + b"}", "label: is an integer beyond 64 bits"),
    ("/slime", b'{"response":"4","unknown":{"a":[' + BIG + b"]}}", "unknown.a[0]: is an integer beyond"),
    ("/slime", b'{"response":[5]}', "response is [5]"),
    ("/slime", b'{"response":"4","metadata":[1]}', "extra_info: is [1]; give a mapping"),
    ("/openrlhf", b'{"query":["4"],"prompts":5}', "prompts: give a list"),
    ("/openrlhf", b'{"query":["4"],"labels":{"a":1}}', "labels: give a list"),
    ("/openrlhf", b'{"query":["4",5]}', "samples[1]: response is 5"),
    ("/verify", b'{"response":{"output":[{"type":"message","content":[5]}]}}', "response.output: give each message's"),
    ("/verify", b'{"response":{"output":[]},"label":' + BIG + b"}", "label: is an integer beyond"),
    ("/verify", b'{"response":{"output":[]},"responses_create_params":{"input":[[5]]}}', None),
]
MANY = [
    ("/v1/score", b'{"response":"a","ground_truth":[' + b"[]," * (7 << 20) + b"[]]}", "262,144 values"),
    ("/v1/score", b'{"samples":[' + b"{}," * 300_000 + b"{}]}", "262,144 values"),
    ("/v1/score", b'{"samples":[' + b'{"response":"4"},' * 1024 + b'{"response":"4"}]}', "1,025 samples"),
    ("/openrlhf", b'{"query":[' + b'"a",' * 300_000 + b'"a"]}', "262,144 values"),
    ("/openrlhf", b'{"query":[' + b'"a",' * 1024 + b'"a"]}', "1,025 samples"),
]


SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(st.characters(), max_size=5)
KEYS = st.sampled_from(["content", "text", "type", "output", "data_source"])
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.lists(st.dictionaries(KEYS, SCALARS, max_size=3), max_size=2)
VALUES |= st.dictionaries(KEYS, VALUES, max_size=3)
FIELDS = (
    "response prompt data_source ground_truth extra_info response_tokens max_tokens finish_reason id reward_model "
    "samples groups query prompts labels label metadata output input type message responses_create_params "
    "verifier_metadata task_spec candidates task_id messages blocks"
)
OBJECTS = st.dictionaries(st.sampled_from(FIELDS.split()), VALUES, max_size=4)
LISTS = st.dictionaries(
    st.sampled_from(["samples", "groups", "query", "candidates"]), st.lists(OBJECTS, max_size=2), max_size=1
)
BODIES = OBJECTS | LISTS


@given(BODIES, st.booleans())
def test_any_body_is_read_to_samples_that_can_be_stored_or_refused(body: Any, escaped: bool) -> None:
    text = json.dumps(body, ensure_ascii=escaped).encode(errors="surrogatepass")
    readers: list[Any] = [read_samples, read_groups]
    readers.append(lambda content: RequestBody([read_candidates(content, read_task(content))], is_batch=False))
    readers += [lambda content, shape=shape: read_shape(content, shape)[1] for shape in GATEWAY_SHAPES.values()]
    for read in readers:
        try:
            groups = read(text).groups
        except RefusedRequestError as refused:
            assert refused.status in (400, 413, 422), refused  # noqa: PT017 (either is right)
            continue
        for group in groups:
            encoded = encoded_group("s:http.one:a", [each.sample("g", i) for i, each in enumerate(group.samples)])
            for (_, record), each in zip(encoded.samples, group.samples, strict=True):
                assert decode(record, Sample).response == each.response


@given(st.text(st.characters()), st.booleans())
def test_halves_of_surrogate_pairs_become_replacement_characters_in_every_shape(text: str, escaped: bool) -> None:
    wanted = plain_text(text)
    for row in ({"response": text}, {"samples": [{"response": text}]}):
        (group,) = read_samples(json.dumps(row, ensure_ascii=escaped).encode(errors="surrogatepass")).groups
        assert group.samples[0].response in (wanted, *_with_halves_apart(text))
    _, body = read_shape(json.dumps({"response": text}).encode(), GATEWAY_SHAPES["/slime"])
    assert body.groups[0].samples[0].response == wanted


def _with_halves_apart(text: str) -> list[str]:
    """Two halves that a caller encoded apart as UTF-8 stay two."""
    return ["".join("\ufffd" if "\ud800" <= character <= "\udfff" else character for character in text)]


async def test_every_route_refuses_what_cannot_travel_by_name(
    start_service: Any, start_gateway: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    async with (
        start_service() as service,
        start_gateway(service) as gateway,
        gateway.http() as http,
        gateway.http(OTHER) as innocent,
    ):
        for path, body, message in BAD:
            answer = await http.post(f"{path}?timeout=20", content=body)
            if message is not None:
                assert 400 <= answer.status_code < 500, (path, body[:100], answer.text)
                assert message in answer.json()["error"]["message"], (body[:100], answer.text)
            else:
                assert answer.status_code in (200, 422), answer.text
        assert (await innocent.post("/v1/score", json=RIGHT)).json()["score"] == 1.0
        assert "Traceback" not in capfd.readouterr().err


async def test_a_body_of_many_values_is_refused_before_they_are_made_and_delays_nobody(
    start_service: Any, start_gateway: Any
) -> None:
    async with (
        start_service() as service,
        start_gateway(service) as gateway,
        gateway.http() as http,
        gateway.http(OTHER) as innocent,
    ):
        bad = asyncio.gather(*(http.post(path, content=body) for path, body, _ in MANY))
        innocents = 0
        while not bad.done():
            assert (await innocent.post("/v1/score", json=RIGHT)).json()["score"] == 1.0
            innocents += 1
        assert innocents >= 2
        for (_, _, message), answer in zip(MANY, await bad, strict=True):
            assert answer.status_code == 413
            assert message in answer.json()["error"]["message"]
        text = json.dumps({"response": "[{," * 200_000, "ground_truth": "4"})  # one value, though many brackets
        assert (await http.post("/v1/score", content=text)).json()["score"] == 0.0


async def test_ids_with_slashes_groups_of_one_and_other_orders_of_keys(start_service: Any, start_gateway: Any) -> None:
    async with start_service() as service, start_gateway(service) as gateway, gateway.http() as http:
        assert (await http.post("/v1/score", json={"id": "a/b?c", **RIGHT})).status_code == 200
        assert (await http.get("/v1/scores/a%2Fb%3Fc")).json()["id"] == "a/b?c"
        group = (await http.post("/v1/groups", json={"id": "g", "samples": [RIGHT]})).json()
        assert (await http.get("/v1/scores/g")).json() == group
        assert "results" in group
        nested = {"a": 1, "b": {"x": [{"p": 1, "q": 2}], "y": 3}}
        other = {"b": {"y": 3, "x": [{"q": 2, "p": 1}]}, "a": 1}
        first = await http.post("/v1/score", json={"id": "k", **RIGHT, "extra_info": nested})
        again = await http.post("/v1/score", json={"id": "k", **RIGHT, "extra_info": other})
        assert again.json() == first.json()
        conflict = await http.post("/v1/score", json={"id": "k", **RIGHT, "extra_info": {"a": 2}})
        assert conflict.status_code == 409
        single = await http.post("/v1/score", json={"id": "g", **RIGHT})
        assert single.status_code == 409


async def test_metrics_need_a_token(start_service: Any, start_gateway: Any) -> None:
    async with start_service() as service, start_gateway(service) as gateway, gateway.http("wrong") as http:
        assert (await http.get("/metrics")).status_code == 401


async def test_connections_without_a_token_lock_nobody_out(
    start_service: Any, start_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_HEAD_WITHIN_S", 0.5)
    monkeypatch.setattr(gateway_module, "_MOST_CONNECTIONS", 60)
    monkeypatch.setattr(Strangers, "__init__", partialmethod(Strangers.__init__, most=20))
    async with start_service() as service, start_gateway(service) as gateway, gateway.http() as http:
        host, port = gateway.url.removeprefix("http://").split(":")
        assert (await http.post("/v1/score", json=RIGHT)).status_code == 200
        opened = []
        for number in range(100):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/score HTTP/1.1\r\nHost: x\r\n" if number % 2 else b"")
            opened.append((reader, writer))
        assert (await http.post("/v1/score", json=RIGHT)).status_code == 200  # on the connection that brought a token
        async with gateway.http(OTHER) as other:
            assert (await other.post("/v1/score", json=RIGHT)).status_code == 200
        for reader, writer in opened:
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 20) == b""  # ended: too many, or too late
            writer.close()
        reader, writer = await asyncio.open_connection(host, int(port))
        with contextlib.suppress(ConnectionResetError):
            writer.write(b"GET /v1/service HTTP/1.1\r\nLong: " + b"x" * (1 << 20))
            await writer.drain()
            assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()
        assert (await http.post("/v1/score", json=RIGHT)).status_code == 200


async def test_bodies_that_come_in_at_once_are_bounded_for_each_token(
    start_service: Any, start_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BodyRoom, "__init__", partialmethod(BodyRoom.__init__, most_bytes=3000, most_of_token=1500))
    async with (
        start_service() as service,
        start_gateway(service) as gateway,
        gateway.http() as http,
        gateway.http(OTHER) as innocent,
    ):
        host, port = gateway.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        token = http.headers["authorization"]
        head = f"POST /v1/score HTTP/1.1\r\nHost: x\r\nAuthorization: {token}\r\nContent-Length: 4000\r\n\r\n"
        writer.write(head.encode() + b" " * 1400)

        async def answered(status: int) -> bool:
            answer = await http.post("/v1/score", json={**RIGHT, "extra_info": {"a": "x" * 200}})
            return bool(answer.status_code == status)

        await until(lambda: answered(429))
        assert (await innocent.post("/v1/score", json={**RIGHT, "extra_info": {"a": "x" * 200}})).status_code == 200
        writer.close()
        await until(lambda: answered(200))


async def test_a_result_that_cannot_be_stored_ends_its_sample_and_no_worker(
    start_service: Any, start_gateway: Any
) -> None:
    async with start_service() as service, start_gateway(service) as gateway, gateway.http() as http:
        samples = [{"response": "lone", "ground_truth": "4"}, RIGHT]
        lone, right = (await http.post("/v1/score?timeout=20", json={"samples": samples})).json()["results"]
        assert (lone["outcome"], right["score"]) == ("data_error", 1.0)


async def test_a_group_that_redis_refuses_ends_alone(start_service: Any, start_gateway: Any) -> None:
    async with (
        start_service(workers=0) as service,
        start_gateway(service, room=1) as gateway,
        gateway.http() as http,
        gateway.http(OTHER) as innocent,
    ):
        waiting = asyncio.create_task(http.post("/v1/score", json={"id": "first", **RIGHT}))
        both = asyncio.create_task(
            http.post("/v1/score", json={"samples": [{"id": "bad", **RIGHT}, {"id": "good", **RIGHT}]})
        )
        while (await http.get("/v1/scores/first")).status_code != 202:
            await asyncio.sleep(0.01)
        key = f"plaudit:{{{service.run}}}:group:s:http.one:bad"
        with redis.Redis.from_url(service.server.url, password=service.server.password) as client:
            client.set(key, "not a hash")  # each command of its submission is refused for good
        async with service.worker():
            assert (await waiting).status_code == 200
            refused = await both
            assert (refused.status_code, refused.json()["error"]["type"]) == (422, "refused")
            assert (await http.get("/v1/scores/good?wait=20")).json()["score"] == 1.0
            assert (await innocent.post("/v1/score", json=RIGHT)).status_code == 200


async def test_a_result_that_this_version_cannot_read_is_typed(start_service: Any, start_gateway: Any) -> None:
    async with start_service(workers=0) as service, start_gateway(service) as gateway, gateway.http() as http:
        waiting = asyncio.create_task(http.post("/v1/score", json={"id": "a", **RIGHT}))
        while (await http.get("/v1/scores/a")).status_code != 202:
            await asyncio.sleep(0.01)
        with redis.Redis.from_url(service.server.url, password=service.server.password) as client:
            results = f"plaudit:{{{service.run}}}:session:http.one:results"
            client.xadd(results, {"group": "s:http.one:a", "0": b"1.0 2.0 1\n\x81\xa7outcome\xa4later"})
        assert (await waiting).json()["reason"].startswith("its result cannot be read")
        assert (await http.get("/v1/service")).status_code == 200
