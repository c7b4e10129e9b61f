"""What a server's answer makes of a sample, and which server is asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from plaudit_reward.attempts import Rules, Stage
from plaudit_reward.endpoint.served import ModelScorer, ServerPool, find, request_body
from plaudit_reward.pipeline import Pipeline
from plaudit_reward.scorer import Attempt
from plaudit_wire.errors import ConfigurationError, DataError, InfrastructureError, ScoreTimeoutError, ScoringError
from plaudit_wire.records import Sample

Servers = Callable[[int], Awaitable[list[Any]]]
Open = Callable[..., Awaitable[ModelScorer]]

SAMPLE = Sample("g", 0, "d", prompt="2 + 2?", response="4")
ERROR = b'{"error": {"message": "too long for me"}}'


async def test_the_logit_is_the_value(servers: Servers, open_scorer: Open) -> None:
    (server,) = await servers(1)
    score = await (await open_scorer([server.url])).score(SAMPLE, Attempt(10))
    assert (score.outcome, score.value) == ("scored", 1.5)


async def test_the_request_has_the_expected_body() -> None:
    chat = json.loads(request_body(SAMPLE, "chat"))
    assert chat["messages"] == [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    assert chat["use_activation"] is False
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    with_messages = Sample("g", 0, "d", prompt="rendered", response="r", messages=messages)
    assert json.loads(request_body(with_messages, "chat"))["messages"][:2] == messages
    assert json.loads(request_body(with_messages, "text"))["input"] == "renderedr"


WRONG: list[tuple[Any, type[ScoringError], str]] = [
    ((400, {}, ERROR), DataError, "refused the sample: 400: too long for me"),
    ((404, {}, b"nothing here"), DataError, "refused the sample: 404: nothing here"),
    ((200, {}, b'{"data": [{"probs": [1, 2]}]}'), DataError, "2 labels; a reward model has one"),
    ((200, {}, b'{"data": []}'), InfrastructureError, "not a classification"),
    ((200, {}, b"<html>"), InfrastructureError, "not a classification"),
    ((500, {}, ERROR), InfrastructureError, "responded 500: too long for me"),
    ((408, {}, ERROR), InfrastructureError, "responded 408"),
    (None, InfrastructureError, "ended before the whole response"),
]


@pytest.mark.parametrize(("reply", "kind", "words"), WRONG)
async def test_failures_are_typed_and_quote_the_server(
    servers: Servers, open_scorer: Open, reply: Any, kind: type[ScoringError], words: str
) -> None:
    (server,) = await servers(1)
    scorer = await open_scorer([server.url])
    server.reply = reply
    with pytest.raises(kind, match=words):
        await scorer.score(SAMPLE, Attempt(10))
    assert len(server.bodies) == 1


async def test_nan_is_a_data_error(servers: Servers, open_scorer: Open) -> None:
    (server,) = await servers(1)
    server.reply = (200, {}, b'{"data": [{"probs": [null]}]}')
    score = await (await open_scorer([server.url])).score(SAMPLE, Attempt(10))
    assert (score.outcome, score.reason) == ("data_error", "the value nan is not finite")


async def test_a_full_server_is_left_for_another_and_its_pause_is_not_the_samples_time(
    servers: Servers, open_scorer: Open
) -> None:
    full, free = await servers(2)
    scorer = await open_scorer([full.url])
    full.reply = (429, {"Retry-After": "2"}, b"")
    attempt = Attempt(1.5)
    asking = asyncio.create_task(scorer.score(SAMPLE, attempt))
    while not full.bodies:
        await asyncio.sleep(0.01)
    full.reply = (200, {}, b'{"data": [{"probs": [3.0]}]}')
    assert (await asking).value == 3.0
    assert 1.5 < attempt.waited_s < 4  # it waited for longer than its limit of work
    both = await open_scorer([full.url, free.url])
    full.reply = (429, {"Retry-After": "60"}, b"")
    scores = await asyncio.gather(*(both.score(SAMPLE, Attempt(10)) for _ in range(10)))
    assert {score.value for score in scores} == {1.5}


async def test_a_server_that_ends_is_asked_no_more_until_it_is_healthy(servers: Servers, open_scorer: Open) -> None:
    ending, other = await servers(2)
    scorer = await open_scorer([ending.url])
    ending.reply, ending.healthy = (503, {}, b""), False
    with pytest.raises(InfrastructureError, match="none of 1 servers"):
        await scorer.score(SAMPLE, Attempt(0.3))
    assert scorer.room() == 0
    ending.reply, ending.healthy = (200, {}, b'{"data": [{"probs": [2.0]}]}'), True
    assert (await scorer.score(SAMPLE, Attempt(20))).value == 2.0
    assert len(ending.bodies) == 2
    assert not other.bodies


async def test_a_server_that_does_not_answer_times_out(servers: Servers, open_scorer: Open) -> None:
    (server,) = await servers(1)

    async def never(body: bytes) -> None:
        await asyncio.sleep(1000)

    server.answer = never
    with pytest.raises(ScoreTimeoutError, match=r"no response within 0\.[12]"):
        await (await open_scorer([server.url])).score(SAMPLE, Attempt(0.2))


async def test_samples_outlast_a_server_that_dies_and_comes_back(servers: Servers, open_scorer: Open) -> None:
    dying, other = await servers(2)
    scorer = await open_scorer([dying.url])
    await other.stop()
    pipeline = Pipeline([Stage(scorer, Rules(retries=2))], timeout_s=30)
    dying.reply = None
    await dying.stop()
    scoring = asyncio.gather(*(pipeline.score(SAMPLE) for _ in range(20)))
    await asyncio.sleep(1.5)  # all attempts that do not wait would be used up by now
    dying.reply = (200, {}, b'{"data": [{"probs": [4.0]}]}')
    await dying.start()
    records = await scoring
    assert [(record.outcome, record.value) for record in records] == [("scored", 4.0)] * 20
    assert all(record.scorers["rm"].attempts == 2 for record in records)


async def test_requests_go_to_all_servers_and_room_is_bounded(servers: Servers, open_scorer: Open) -> None:
    several = await servers(3)
    gate = asyncio.Event()

    async def held(body: bytes) -> Any:
        await gate.wait()
        return (200, {}, b'{"data": [{"probs": [1.0]}]}')

    for server in several:
        server.answer = held
    scorer = await open_scorer([server.url for server in several], max_concurrent=30)
    while not all(server.probes for server in several):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    asking = [asyncio.create_task(scorer.score(SAMPLE, Attempt(30))) for _ in range(27)]
    while sum(len(server.bodies) for server in several) < 27:
        await asyncio.sleep(0.01)
    assert [len(server.bodies) for server in several] == [9, 9, 9]
    assert scorer.room() == 3
    gate.set()
    await asyncio.gather(*asking)
    assert scorer.room() == 30


async def test_servers_may_come_later_and_change(servers: Servers, open_scorer: Open, tmp_path: Path) -> None:
    first, second = await servers(2)
    scorer = await open_scorer([tmp_path.as_uri()], wait=False)
    assert scorer.room() == 0
    asking = asyncio.create_task(scorer.score(SAMPLE, Attempt(30)))
    await asyncio.sleep(0.2)
    (tmp_path / "0.url").write_text(f"{first.url}\n")
    assert (await asking).value == 1.5
    (tmp_path / "0.url").write_text(f"{second.url}\n")
    while not second.bodies:
        await scorer.score(SAMPLE, Attempt(30))
        await asyncio.sleep(0.05)


async def test_a_name_is_all_addresses_that_dns_has_for_it() -> None:
    found, complete = await find(["http://127.0.0.1:8000", "http://localhost:81"])
    assert complete
    assert found[0] == "http://127.0.0.1:8000"
    assert set(found[1:]) <= {"http://127.0.0.1:81", "http://[::1]:81"}
    assert found[1:]
    assert await find(["http://no-such-name.invalid:80"]) == ([], False)


async def test_a_scorer_without_places_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="scorer rm: the address of its model is missing"):
        await ModelScorer(ServerPool("rm", [])).open()
