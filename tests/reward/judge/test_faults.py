"""A judge that misbehaves in every way: each fault has one outcome, told in words, and none is a zero."""

from __future__ import annotations

import asyncio
import email.utils
import json
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import faulty_server as faults
from faulty_server import completion
from plaudit_job.rules.answers import answer_schema
from plaudit_reward.attempts import Rules, Stage
from plaudit_reward.endpoint.access import CircuitOpenError, EndpointRefusedError, EndpointUsage
from plaudit_reward.endpoint.judge import JsonParser
from plaudit_reward.http import ConnectionLostError, ResponseTooLargeError, retry_after_s
from plaudit_reward.pipeline import Pipeline
from plaudit_reward.scorer import Attempt
from plaudit_wire.errors import BusyError, CallTimeoutError, DataError, InfrastructureError
from reward_samples import make_sample

Make = Callable[..., Any]

DRAFT = {"content": "A first draft: score: 4"}
REASONING = {"content": None, "reasoning_content": "score: 4"}

FAULTS: list[tuple[dict[str, Any], type[Exception], str, str]] = [
    ({"status": 429}, BusyError, "responded 429", "429"),
    ({"status": 503, "headers": {"Retry-After": "2"}}, BusyError, "responded 503", "503"),
    ({"status": 500, "body": b"<h1>oh no</h1>"}, InfrastructureError, "responded 500: <h1>oh no</h1>", "500"),
    ({"status": 408}, InfrastructureError, "responded 408", "408"),
    ({"status": 401, "body": {"error": {"message": "bad key hush"}}}, EndpointRefusedError, r"bad key \*\*\*", "401"),
    ({"status": 404, "body": {"detail": "Not Found"}}, EndpointRefusedError, "Not Found.*baseUrl", "404"),
    ({"status": 307, "headers": {"Location": "/v2"}}, EndpointRefusedError, "responded 307", "307"),
    ({"status": 204, "body": b""}, InfrastructureError, "responded 204", "204"),
    ({"status": 400, "body": {"error": {"message": "prompt too long"}}}, DataError, "400: prompt too long", "400"),
    ({"status": 422, "body": {"error": "no"}}, DataError, "responded 422: no", "422"),
    ({"cut": "before"}, ConnectionLostError, "ended before the whole response", "unreachable"),
    ({"cut": "middle"}, ConnectionLostError, "ended before the whole response", "unreachable"),
    ({"body": b'{"choices": [{"mess'}, InfrastructureError, "not a chat completion", "200"),
    ({"body": b"\xff\xfe"}, InfrastructureError, "not a chat completion", "200"),
    ({"body": {"choices": "none"}}, InfrastructureError, r"Expected `array`, got `str` - at `\$.choices`", "200"),
    ({"body": {"choices": []}}, InfrastructureError, "no choices", "200"),
    ({"body": {"choices": [{"message": {"content": 7}}]}}, InfrastructureError, "not a chat completion", "200"),
    ({"body": {"choices": [{"message": {}, "finish_reason": "length"}]}}, DataError, "cut short .*length", "200"),
    ({"body": {"choices": [{"message": {"content": "score: 4"}, "finish_reason": "length"}]}}, DataError, "cut", "200"),
    *(
        ({"body": {"choices": [{"message": DRAFT, "finish_reason": reason}]}}, DataError, "cut short", "200")
        for reason in ("max_tokens", "MAX_TOKENS", "model_length", "SAFETY", "sensitive")
    ),
    *(
        (
            {"body": {"choices": [{"message": DRAFT, "finish_reason": reason}]}},
            InfrastructureError,
            "broke .* off",
            "200",
        )
        for reason in ("abort", "error", "insufficient_system_resource")
    ),
    (
        {"body": {"choices": [{"message": {"refusal": "I cannot."}}]}},
        DataError,
        "refuses to answer: 'I cannot.'",
        "200",
    ),
    ({"body": {"choices": [{"message": REASONING, "finish_reason": "stop"}]}}, DataError, "answer is empty", "200"),
    ({"body": completion("<think>score: 4")}, DataError, "reasoning alone", "200"),
    ({"body": b'{"choices": ' + b"[" * 100_000}, InfrastructureError, "not a chat completion", "200"),
    ({"body": b"x" * (5 << 20)}, ResponseTooLargeError, "longer than", "unreachable"),
    ({"after_s": 5}, CallTimeoutError, "no response within 0.2 s", "timeout"),
    ({"drip_s": 0.05}, CallTimeoutError, "no response within 0.2 s", "timeout"),
]


@pytest.mark.parametrize(("fault", "kind", "words", "status"), FAULTS)
async def test_each_fault_has_a_kind_a_message_and_a_count(
    server: Any,
    make_judge: Make,
    usage: EndpointUsage,
    fault: dict[str, Any],
    kind: type[Exception],
    words: str,
    status: str,
) -> None:
    server.reply = lambda request, number: faults.Reply(**fault)
    judge = await make_judge(api_key="hush")
    with pytest.raises(kind, match=words) as failure:
        await judge.score(make_sample(), Attempt(0.2 if "_s" in str(fault) else 10.0))
    assert type(failure.value) is kind
    assert "hush" not in str(failure.value)
    assert usage.requests == {status: 1}


@pytest.mark.parametrize(
    "body",
    [
        completion(usage={"prompt_tokens": 10**30, "completion_tokens": -1}),
        completion(usage="none"),
        json.dumps(completion(usage={"prompt_tokens": 0}, created=0)).replace(": 0", ": 1e400").encode(),
        completion(other=[[[10**30]]]),
        {"choices": [{"message": {"content": "score: 4", "refusal": [1]}, "finish_reason": {"type": "stop"}}]},
        completion([{"type": "thinking", "thinking": "score: 1"}, {"type": "text", "text": "score: 4"}]),
        completion("<think>score: 1</think>score: 4"),
        json.dumps(completion("\ud83d score: 4")).encode(),
    ],
)
async def test_what_stands_beside_the_verdict_costs_no_score(server: Any, make_judge: Make, body: Any) -> None:
    server.reply = lambda request, number: faults.Reply(body=body)
    judge = await make_judge()
    score = await judge.score(make_sample(), Attempt(10.0))
    assert score.value == 4.0
    msgspec.json.encode(score)


SCHEMA = answer_schema(["score"], (0.0, 10.0), None)


async def test_a_judge_is_asked_for_its_form_and_without_where_the_endpoint_refuses_it(
    server: Any, make_judge: Make
) -> None:
    def reply(request: Any, number: int) -> Any:
        if "response_format" in request.body and number > 1:
            return faults.Reply(status=400, body={"error": {"message": "response_format is not supported"}})
        return faults.Reply(body=completion('{"score": 4}'))

    server.reply = reply
    judge = await make_judge(parser=JsonParser("$.score"), schema=lambda count: SCHEMA)
    for _ in range(3):
        assert (await judge.score(make_sample(), Attempt(10.0))).value == 4.0
    formats = [request.body.get("response_format") for request in server.requests]
    wanted = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": SCHEMA}}
    assert formats == [wanted, wanted, None, None]
    server.reply = lambda request, number: faults.Reply(status=400, body={"error": "too long"})
    refused = await make_judge(parser=JsonParser("$.score"), schema=lambda count: SCHEMA)
    for _ in range(2):  # the prompt is refused, not the form: the next sample asks for it again
        with pytest.raises(DataError, match="too long"):
            await refused.score(make_sample(), Attempt(10.0))
    assert ["response_format" in request.body for request in server.requests[4:]] == [True, False, True, False]


async def test_a_number_outside_the_rubric_is_a_data_error(server: Any, make_judge: Make) -> None:
    judge = await make_judge(limits=(0.0, 10.0))
    values = {"score: 0": 0.0, "score: 10": 10.0, "score: 87": None, "score: -3": None}
    for content, value in values.items():
        server.reply = lambda request, number, content=content: faults.Reply(body=completion(content))
        score = await judge.score(make_sample(), Attempt(10.0))
        assert score.value == value
        assert value is not None or "is outside judge.parse.range, 0 to 10" in str(score.reason)


async def test_an_answer_gives_a_score_with_its_text_and_cost(
    server: Any, make_judge: Make, usage: EndpointUsage
) -> None:
    judge = await make_judge(api_key="hush", arguments={"temperature": 0, "max_tokens": 5})
    score = await judge.score(make_sample("my answer"), Attempt(10.0))
    assert score.value == 4.0
    assert score.extra == {"answer": "score: 4", "prompt_tokens": 7.0, "completion_tokens": 3.0}
    (request,) = server.requests
    assert request.body == {
        "model": "big",
        "messages": [{"role": "user", "content": "Rate my answer."}],
        "temperature": 0,
        "max_tokens": 5,
    }
    assert request.headers["authorization"] == "Bearer hush"
    assert (usage.requests, usage.tokens) == ({"200": 1}, {"prompt": 7, "completion": 3})


async def test_a_storm_of_429_ends_with_every_sample_scored(server: Any, make_judge: Make) -> None:
    """Every second request is refused, now with and now without saying for how long."""

    def reply(request: Any, number: int) -> Any:
        if number % 2:
            return faults.Reply(429, headers={"Retry-After": "0.1"} if number % 4 == 1 else {})
        return faults.Reply()

    server.reply = reply
    pipeline = Pipeline([Stage(await make_judge(), Rules(retries=20))], timeout_s=60)
    scorings = await asyncio.gather(*(pipeline.score(make_sample(index=i)) for i in range(24)))
    assert [scoring.value for scoring in scorings] == [4.0] * 24
    assert sum(scoring.scorers["big"].attempts for scoring in scorings) == len(server.requests) == 48


async def test_retry_after_holds_the_sample_and_those_that_come_after_it(server: Any, make_judge: Make) -> None:
    server.reply = lambda request, number: (
        faults.Reply(429, headers={"Retry-After": "2"}) if number == 1 else faults.Reply()
    )
    pipeline = Pipeline([Stage(await make_judge())])
    first = asyncio.create_task(pipeline.score(make_sample()))
    while not server.requests:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    second = await pipeline.score(make_sample(index=1))
    times = [request.arrived for request in server.requests]
    assert (await first).value == second.value == 4.0
    assert min(times[1:]) - times[0] >= 2.0
    assert (await first).retry_s >= 2.0  # a retry counts against the sample's time
    assert second.limiter_s >= 1.0  # waiting because others were told to does not
    assert second.scorers["big"].held_s >= 1.0  # and the endpoint's pause is told from the job's own limits
    assert second.call_s < 1.0


async def test_a_retry_after_beyond_the_deadline_of_a_sample_ends_the_sample(server: Any, make_judge: Make) -> None:
    server.reply = lambda request, number: faults.Reply(429, headers={"Retry-After": "600"})
    scoring = await Pipeline([Stage(await make_judge())], timeout_s=5).score(make_sample())
    assert (scoring.outcome, scoring.value, len(server.requests)) == ("infra_error", None, 1)


async def test_a_slow_attempt_is_tried_again_within_the_samples_time(server: Any, make_judge: Make) -> None:
    server.reply = lambda request, number: faults.Reply(after_s=9 if number < 3 else 0)
    scoring = await Pipeline([Stage(await make_judge(), Rules(timeout_s=1.0))]).score(make_sample())
    assert (scoring.value, scoring.scorers["big"].attempts) == (4.0, 3)
    server.reply = lambda request, number: faults.Reply(after_s=9)
    masked = await Pipeline([Stage(await make_judge(), Rules(timeout_s=0.2, retries=1))]).score(make_sample())
    assert (masked.outcome, masked.value) == ("timeout", None)


def test_retry_after_is_read_as_seconds_and_as_a_date_by_the_servers_clock() -> None:
    an_hour_ago = time.time() - 3600
    date = {
        "date": email.utils.formatdate(an_hour_ago, usegmt=True),
        "retry-after": email.utils.formatdate(an_hour_ago + 30, usegmt=True),
    }
    assert retry_after_s(date) == 30.0
    assert retry_after_s({"retry-after": "1.5"}) == 1.5
    assert retry_after_s({"retry-after": "-3"}) == 0.0
    assert retry_after_s({"retry-after": "99999"}) == 3600.0
    assert [retry_after_s({"retry-after": text}) for text in ("", "soon", "nan", "inf", "1e400")] == [None] * 5


async def test_an_outage_opens_the_circuit_and_one_call_at_a_time_sees_whether_it_is_over(
    server: Any, make_judge: Make, usage: EndpointUsage
) -> None:
    judge = await make_judge()
    await server.stop()
    for index in range(5):
        with pytest.raises(InfrastructureError, match="cannot connect: Connection refused"):
            await judge.score(make_sample(index=index), Attempt(5.0))
    assert judge.circuit_open
    assert judge.room() == 0
    with pytest.raises(
        CircuitOpenError,
        match=r"endpoint http://127.*/v1: 5 failures in a row \(last: http://127.*refused\); next try in [01] s",
    ) as error:
        await judge.score(make_sample(), Attempt(5.0))
    assert error.value.retry_after_s is not None
    assert usage.requests == {"unreachable": 5}
    await server.start()
    scoring = await Pipeline([Stage(judge, Rules(retries=3))]).score(make_sample())
    assert scoring.value == 4.0
    assert not judge.circuit_open
    assert judge.room() > 1


async def test_an_outage_masks_samples_and_invents_no_zero(server: Any, make_judge: Make) -> None:
    server.reply = lambda request, number: faults.Reply(500)
    pipeline = Pipeline([Stage(await make_judge(), Rules(retries=2))], timeout_s=60)
    scorings = await asyncio.gather(*(pipeline.score(make_sample(index=i)) for i in range(40)))
    assert {(scoring.outcome, scoring.value) for scoring in scorings} == {("infra_error", None)}
    assert pipeline.circuits_open == ["big"]
    assert len(server.requests) < 100  # of 120 that retries alone would have made


async def test_a_wrong_key_opens_the_circuit_at_once(server: Any, make_judge: Make) -> None:
    server.reply = lambda request, number: faults.Reply(401, {"error": {"message": "no such key"}})
    judge = await make_judge()
    with pytest.raises(EndpointRefusedError):
        await judge.score(make_sample(), Attempt(5.0))
    with pytest.raises(CircuitOpenError, match=r"401: no such key \(check apiKeySecret\)"):
        await judge.score(make_sample(), Attempt(5.0))


async def test_samples_that_are_refused_do_not_open_the_circuit(server: Any, make_judge: Make) -> None:
    judge = await make_judge()
    server.reply = lambda request, number: faults.Reply(400)
    for index in range(12):
        with pytest.raises(DataError):
            await judge.score(make_sample(index=index), Attempt(5.0))
    server.reply = lambda request, number: faults.Reply(429)
    for index in range(12):
        with pytest.raises(BusyError):
            await judge.score(make_sample(index=index), Attempt(5.0))
    assert not judge.circuit_open


async def test_requests_that_hang_while_others_get_answers_do_not_open_the_circuit(
    server: Any, make_judge: Make
) -> None:
    """Ten of 30 hang and time out in the same moment, when the answers to the others have long arrived."""
    server.reply = lambda request, number: faults.Reply(after_s=30 if number <= 10 else 0)
    judge = await make_judge()
    ended = await asyncio.gather(
        *(judge.score(make_sample(index=i), Attempt(2.0)) for i in range(30)), return_exceptions=True
    )
    assert sum(isinstance(one, CallTimeoutError) for one in ended) == 10
    assert not judge.circuit_open


async def test_one_refusal_among_many_answers_delays_its_own_sample_only(server: Any, make_judge: Make) -> None:
    server.reply = lambda request, number: (
        faults.Reply(429, headers={"Retry-After": "60"}) if number == 20 else faults.Reply()
    )
    judge = await make_judge()
    for index in range(30):
        if index == 19:
            with pytest.raises(BusyError):
                await judge.score(make_sample(index=index), Attempt(5.0))
        else:
            await judge.score(make_sample(index=index), Attempt(5.0))
    server.reply = lambda request, number: faults.Reply(429, headers={"Retry-After": "60"})
    ended = await asyncio.gather(
        *(judge.score(make_sample(index=i), Attempt(5.0)) for i in range(12)), return_exceptions=True
    )
    assert all(isinstance(one, BusyError) for one in ended)
    waiting = asyncio.create_task(judge.score(make_sample(), Attempt(5.0)))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    assert len(server.requests) == 42
    waiting.cancel()
