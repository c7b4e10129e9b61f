"""The client against a real HTTP server that answers, refuses and cuts as a service and its proxies may."""

import asyncio
import datetime
import decimal
import functools
import json
import math
import pickle
import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from faulty_server import FaultyServer, Reply, Request
from plaudit_client import (
    AuthenticationError,
    InvalidSampleError,
    NoScoreError,
    ProtocolError,
    Result,
    RewardClient,
    SyncRewardClient,
    UnavailableError,
)
from plaudit_client.client import encode_sample

SAMPLE = {"response": "#### 4", "ground_truth": "4"}


def result(sample: dict[str, Any], **changes: Any) -> dict[str, Any]:
    of = {"id": sample["id"], "score": float(len(sample["response"])), "outcome": "scored", "reason": None}
    scorers = {"length": {"outcome": "scored", "value": 1.0, "seconds": 0.1}}
    return {**of, "scorers": scorers, "seconds": 0.5, **changes}


def lines(*answers: dict[str, Any]) -> bytes:
    return b"\n".join(json.dumps(answer).encode() for answer in answers) + b"\n"


def scored(request: Request) -> Reply:
    return Reply(body=lines(*(result(sample) for sample in request.body["samples"])))


def refused(status: int, message: str = "no", **more: Any) -> Reply:
    return Reply(status=status, body={"error": {"type": "refused", "message": message, **more}})


@pytest.fixture
async def server() -> AsyncIterator[FaultyServer]:
    async with FaultyServer("/v1/score", "/v1/groups") as server:
        server.reply = lambda request, number: scored(request)
        yield server


def address(server: FaultyServer) -> str:
    return server.url.removesuffix("/v1")


def client_of(server: FaultyServer, **arguments: Any) -> RewardClient:
    return RewardClient(address(server), "secret", **arguments)


async def test_a_sample_gets_its_result_and_the_request_carries_the_token(server: FaultyServer) -> None:
    async with client_of(server) as client:
        scored = await client.score({**SAMPLE, "id": "a"})
    assert (scored.id, scored.score, scored.outcome, scored.seconds) == ("a", 6.0, "scored", 0.5)
    assert scored.scorers["length"].value == 1.0
    assert server.requests[0].headers["authorization"] == "Bearer secret"


@pytest.mark.parametrize("token", ["secret\n", "secr\net", "geheim\u00e9", "\u2026", " secret"])
@pytest.mark.parametrize("kind", [RewardClient, SyncRewardClient])
def test_a_token_that_no_header_can_carry_is_refused_at_once(kind: type[Any], token: str) -> None:
    with pytest.raises(ValueError, match="give it as service"):
        kind("http://127.0.0.1:1", token)


async def test_callers_of_the_same_moment_share_requests(server: FaultyServer) -> None:
    async with client_of(server) as client:
        results = await asyncio.gather(*(client.score({"response": "x" * n}) for n in range(2000)))
    assert [each.score for each in results] == list(map(float, range(2000)))
    assert len(server.requests) < 200


@pytest.mark.parametrize(
    "fault", [Reply(status=503), Reply(status=500, body=b"proxy"), Reply(cut="before"), refused(429)], ids=repr
)
async def test_a_fault_of_the_service_is_retried_under_the_same_id(server: FaultyServer, fault: Reply) -> None:
    server.reply = lambda request, number: fault if number <= 2 else scored(request)
    async with client_of(server) as client:
        assert (await client.score(SAMPLE)).score == 6.0
    ids = {sample["id"] for request in server.requests for sample in request.body["samples"]}
    assert len(server.requests) == 3
    assert len(ids) == 1


async def test_results_before_a_cut_count_and_the_others_are_sent_again(server: FaultyServer) -> None:
    def reply(request: Request, number: int) -> Reply:
        whole = scored(request)
        return Reply(body=whole.body[: len(whole.body) // 2]) if number == 1 else whole

    server.reply = reply
    async with client_of(server) as client:
        results = await asyncio.gather(*(client.score({"response": "x" * n}) for n in range(10)))
    assert [each.score for each in results] == list(map(float, range(10)))
    assert 0 < len(server.requests[1].body["samples"]) < 10


async def test_retry_after_is_respected(server: FaultyServer) -> None:
    server.reply = lambda request, number: (
        Reply(status=429, headers={"retry-after": "0.2"}) if number == 1 else scored(request)
    )
    async with client_of(server) as client:
        await client.score(SAMPLE)
    assert server.requests[1].arrived - server.requests[0].arrived >= 0.2


async def test_only_the_caller_of_a_refused_sample_gets_the_error(server: FaultyServer) -> None:
    server.reply = lambda request, number: (
        refused(422, "1 sample is invalid", samples={"1": "ground_truth: too long"}) if number == 1 else scored(request)
    )
    async with client_of(server) as client:
        results = await asyncio.gather(*(client.score(SAMPLE) for _ in range(3)), return_exceptions=True)
    assert isinstance(results[1], InvalidSampleError)
    assert "ground_truth: too long" in str(results[1])
    assert isinstance(results[0], Result)
    assert isinstance(results[2], Result)


async def test_a_refusal_that_names_no_sample_is_narrowed_down(server: FaultyServer) -> None:
    def reply(request: Request, number: int) -> Reply:
        return refused(413, "too large") if any(s.get("big") for s in request.body["samples"]) else scored(request)

    server.reply = reply
    async with client_of(server) as client:
        samples = [SAMPLE, {**SAMPLE, "big": True}, SAMPLE]
        results = await asyncio.gather(*map(client.score, samples), return_exceptions=True)
    assert [type(each) for each in results] == [Result, InvalidSampleError, Result]


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (refused(401, "wrong token"), AuthenticationError),
        (Reply(status=404, body=b"<html>"), ProtocolError),
        (Reply(body=b"hello\n"), ProtocolError),
    ],
)
async def test_a_permanent_refusal_is_an_error_at_once(
    server: FaultyServer, reply: Reply, error: type[Exception]
) -> None:
    server.reply = lambda request, number: reply
    async with client_of(server) as client:
        with pytest.raises(error):
            await client.score(SAMPLE)
    assert len(server.requests) == 1


async def test_a_service_that_stays_away_is_an_error_after_the_timeout(server: FaultyServer) -> None:
    server.reply = lambda request, number: refused(503, "restarting")
    async with client_of(server, timeout_s=0.3) as client:
        with pytest.raises(UnavailableError, match=r"within 0\.3 s: status 503: restarting"):
            await client.score(SAMPLE)


async def test_many_samples_come_back_in_order_of_completion_with_their_positions(server: FaultyServer) -> None:
    async with client_of(server) as client:
        found = {each.index: each.score async for each in client.score_many({"response": "x" * n} for n in range(5000))}
    assert found == {n: float(n) for n in range(5000)}


async def test_a_group_is_one_item_of_a_request(server: FaultyServer) -> None:
    def reply(request: Request, number: int) -> Reply:
        groups = request.body["groups"]
        results = [[result({**s, "id": g["id"]}, index=i) for i, s in enumerate(g["samples"])] for g in groups]
        return Reply(body=lines(*({"id": g["id"], "results": r} for g, r in zip(groups, results, strict=True))))

    server.reply = reply
    async with client_of(server) as client:
        groups = await asyncio.gather(*(client.score_group([{"response": "x" * n}, SAMPLE]) for n in range(3)))
    assert [[each.score for each in group] for group in groups] == [[0.0, 6.0], [1.0, 6.0], [2.0, 6.0]]
    assert [each.index for each in groups[0]] == [0, 1]
    assert len(server.requests) == 1


async def test_values_of_numpy_become_json_and_others_name_the_sample(server: FaultyServer) -> None:
    async with client_of(server) as client:
        await client.score({**SAMPLE, "extra_info": {"index": np.int64(3), "scores": np.ones(2)}})
        with pytest.raises(InvalidSampleError, match="object is not a JSON value"):
            await client.score({**SAMPLE, "extra_info": {"x": object()}})
        with pytest.raises(InvalidSampleError, match="response: give the generated text"):
            await client.score({"ground_truth": "4"})
    assert server.requests[0].body["samples"][0]["extra_info"] == {"index": 3, "scores": [1.0, 1.0]}


async def test_what_pandas_and_parquet_give_travels_as_at_every_other_door(server: FaultyServer) -> None:
    given = {
        "absent": float("nan"),
        "many": [np.float32("nan"), {"deeper": (1, np.nan)}],
        "price": decimal.Decimal("1.20"),
        "when": datetime.date(2026, 1, 2),
        "at": np.datetime64("2026-01-02T03:04:05.000000006"),
    }
    async with client_of(server) as client:
        await client.score({**SAMPLE, "extra_info": given})
    assert server.requests[0].body["samples"][0]["extra_info"] == {
        "absent": None,
        "many": [None, {"deeper": [1, None]}],
        "price": "1.20",
        "when": "2026-01-02",
        "at": "2026-01-02T03:04:05",
    }


class Faulty(dict[str, int]):
    def items(self) -> Any:
        raise RuntimeError("no reading")


DEEP: Any = functools.reduce(lambda inner, _: [inner], range(2000), None)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ([0, math.inf], r"extra_info.x\[1\]: a number beyond 64 bits, or infinite; write it as text"),
        ({"n": [10**5000, math.nan]}, r"extra_info.x.n\[0\]: a number beyond 64 bits"),
        ({"b": b"x"}, "extra_info.x.b: bytes is not a JSON value; give text"),
        ({(1, 2): 3}, r"extra_info.x: has the key \(1, 2\), which is no text"),
        ({math.inf: 3}, "extra_info.x: has the key inf"),
        (Faulty(a=1), "extra_info.x: no reading; give text"),
        (DEEP, r"extra_info.x\[0\].*: is nested more than 64 levels deep; give flatter data"),
    ],
)
def test_a_part_that_cannot_travel_is_named(value: Any, error: str) -> None:
    with pytest.raises(InvalidSampleError, match=error):
        encode_sample({**SAMPLE, "extra_info": {"x": value}})


async def test_a_pickled_client_scores(server: FaultyServer) -> None:
    async with client_of(server) as client:
        await client.score(SAMPLE)
        copy = pickle.loads(pickle.dumps(client))
    async with copy:
        assert (await copy.score(SAMPLE)).score == 6.0


async def test_a_client_serves_several_event_loops(server: FaultyServer) -> None:
    client = client_of(server)

    async def once() -> float:
        async with client:
            return (await client.score(SAMPLE)).require_score()

    assert await once() == await asyncio.to_thread(asyncio.run, once()) == 6.0


async def test_threads_share_the_requests_of_a_blocking_client(server: FaultyServer) -> None:
    scores: list[float] = []

    def work() -> None:
        with SyncRewardClient(address(server), "secret") as client:
            threads = [threading.Thread(target=lambda: scores.append(client.score(SAMPLE).score)) for _ in range(50)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(each.index for each in client.score_many([SAMPLE] * 3)) == [0, 1, 2]
            with pickle.loads(pickle.dumps(client)) as copy:
                assert copy.score(SAMPLE).score == 6.0

    await asyncio.to_thread(work)
    assert scores == [6.0] * 50


def test_a_missing_score_is_an_error_where_one_is_required() -> None:
    result = Result("a", None, "timeout", "judge: 30 s are over", {}, 31.0)
    with pytest.raises(NoScoreError, match="sample a has no score: timeout: judge: 30 s are over"):
        result.require_score()
