"""Every call of the client ends: with its result, or with an error that says why, and within ``timeout_s``."""

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faulty_server import FaultyServer, Reply, Request
from plaudit_client import InvalidSampleError, ProtocolError, RewardClient, RewardError, SyncRewardClient
from plaudit_client.adapters.service import blocking_client
from plaudit_client.client import Outage
from waiting import until

SAMPLE = {"response": "#### 4"}
HELD = Reply(after_s=3600.0)


def answer(request: Request, number: int = 0) -> Reply:
    lines = (
        {"id": each["id"], "score": 6.0, "outcome": "scored", "reason": None, "scorers": {}, "seconds": 0.1}
        for each in request.body["samples"]
    )
    return Reply(body=b"".join(json.dumps(line).encode() + b"\n" for line in lines))


@pytest.fixture
async def server() -> AsyncIterator[FaultyServer]:
    async with FaultyServer("/v1/score", "/v1/groups") as server:
        server.reply = answer
        yield server


@pytest.fixture
def closed_port() -> Iterator[int]:
    with socket.socket() as bound:  # bound, and so nobody else's; it does not listen
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


async def in_child(work: Callable[[], Any]) -> int:
    """Run ``work`` in a forked child; return its exit status: 0 if it was truthy, 14 if it never ended."""

    def fork() -> int:
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            code = 1
            try:
                code = 0 if work() else 2
            finally:
                os._exit(code)
        return os.waitpid(child, 0)[1]

    return await asyncio.to_thread(fork)


async def test_a_forked_child_uses_the_client_that_it_inherits(server: FaultyServer) -> None:
    client = blocking_client(server.origin, "secret", 20.0)  # an adapter keeps it: every DataLoader forks with it
    stop = threading.Event()

    def use() -> None:
        while not stop.is_set():
            client.score(SAMPLE)

    others = [asyncio.create_task(asyncio.to_thread(use)) for _ in range(4)]
    await until(lambda: len(server.requests) > 10)
    statuses = [
        await in_child(lambda: client.score(SAMPLE).score == 6.0 and len([*client.score_many([SAMPLE] * 3)]) == 3)
        for _ in range(3)
    ]
    stop.set()
    await asyncio.gather(*others)
    assert statuses == [0, 0, 0]
    assert (await asyncio.to_thread(client.score, SAMPLE)).score == 6.0
    await asyncio.to_thread(client.close)


async def test_an_iteration_that_began_before_a_fork_ends_in_the_child(server: FaultyServer) -> None:
    client = SyncRewardClient(server.origin)
    results = client.score_many([SAMPLE] * 3)
    await asyncio.to_thread(next, results)

    def go_on() -> bool:
        try:
            return len(list(results)) == -1
        except RewardError as error:
            return "forked: call it again here" in str(error)

    assert await in_child(go_on) == 0
    assert len(await asyncio.to_thread(list, results)) == 2
    await asyncio.to_thread(client.close)


@pytest.mark.parametrize("num_calls", [1, 300])
async def test_a_blocking_client_that_is_closed_ends_all_calls(server: FaultyServer, num_calls: int) -> None:
    server.reply = lambda request, number: HELD
    client = SyncRewardClient(server.origin)
    ended: Counter[str] = Counter()

    def call(way: Callable[[], Any]) -> None:
        try:
            ended[repr(way())] += 1
        except RewardError as error:
            ended[f"{type(error).__name__}: {error}"] += 1

    ways = [
        lambda: client.score(SAMPLE),
        lambda: list(client.score_many([SAMPLE])),
        lambda: client.score_group([SAMPLE]),
    ]
    with ThreadPoolExecutor(num_calls) as threads:
        for number in range(num_calls):
            threads.submit(call, ways[number % 3])
        await until(lambda: server.requests)
        await asyncio.to_thread(client.close)
        await until(lambda: ended.total() == num_calls)
    assert ended == {"UnavailableError: the client was closed": num_calls}
    server.reply = answer
    assert (await asyncio.to_thread(client.score, SAMPLE)).score == 6.0
    await asyncio.to_thread(client.close)


async def test_a_call_beside_close_gets_its_result_or_the_error(server: FaultyServer) -> None:
    client = SyncRewardClient(server.origin)
    ended: Counter[str] = Counter()

    def calls() -> None:
        for _ in range(40):
            try:
                ended[str(client.score(SAMPLE).score)] += 1
            except RewardError as error:
                ended[str(error)] += 1

    with ThreadPoolExecutor(8) as threads:
        working = [threads.submit(calls) for _ in range(8)]
        while not all(each.done() for each in working):
            await asyncio.to_thread(client.close)
        for each in working:
            each.result()
    await asyncio.to_thread(client.close)
    assert ended.total() == 320
    assert set(ended) <= {"6.0", "the client was closed"}


@pytest.mark.parametrize("num_calls", [1, 300])
async def test_a_client_that_is_closed_ends_the_calls_of_its_loop(server: FaultyServer, num_calls: int) -> None:
    server.reply = lambda request, number: HELD
    client = RewardClient(server.origin)
    calls = [asyncio.create_task(client.score(SAMPLE)) for _ in range(num_calls)]
    await until(lambda: server.requests)
    await client.aclose()
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert Counter(map(str, ended)) == {"the client was closed": num_calls}


class Collects:
    """A value of a sample whose conversion runs the garbage collector in the client's thread."""

    def tolist(self) -> int:
        return gc.collect()


class Holder:
    """What an abandoned iteration may hang on: an object that refers to itself, as a traceback does."""

    def __init__(self, results: Iterator[Any]) -> None:
        self.results, self.own = results, self


async def test_an_abandoned_iteration_may_end_in_the_clients_own_thread(server: FaultyServer) -> None:
    client = SyncRewardClient(server.origin)

    def abandon() -> weakref.ref[Holder]:
        holder = Holder(client.score_many([SAMPLE] * 600))
        next(holder.results)
        return weakref.ref(holder)

    gc.disable()
    try:
        holder = await asyncio.to_thread(abandon)
        assert holder() is not None
        sample = {**SAMPLE, "extra_info": {"number": Collects()}}
        assert (await asyncio.wait_for(asyncio.to_thread(client.score, sample), 20.0)).score == 6.0
    finally:
        gc.enable()
    assert holder() is None
    await asyncio.to_thread(client.close)


async def test_samples_that_take_long_delay_no_other_caller(server: FaultyServer) -> None:
    client = SyncRewardClient(server.origin)
    go_on = threading.Event()

    def slow() -> Iterator[dict[str, Any]]:
        yield SAMPLE
        client.score(SAMPLE)  # the source may use the client itself
        go_on.wait()
        yield SAMPLE

    many = asyncio.create_task(asyncio.to_thread(lambda: list(client.score_many(slow()))))
    try:
        await until(lambda: sum(len(request.body["samples"]) for request in server.requests) == 2)
        assert (await asyncio.to_thread(client.score, SAMPLE)).score == 6.0
    finally:
        go_on.set()
    assert sorted(each.index for each in await many) == [0, 1]
    await asyncio.to_thread(client.close)


def line(value: Any) -> Reply:
    return Reply(body=value if isinstance(value, bytes) else json.dumps(value).encode() + b"\n")


@pytest.mark.parametrize(
    "reply",
    [
        Reply(body=b"hello", headers={"content-encoding": "gzip"}),
        line(b"[" * 100_000 + b"\n"),
        Reply(body=b"<html>", headers={"content-type": "text/html"}),
        Reply(body=b"{}"),
        line([1]),
        line({"id": [1]}),
        line({"id": "a", "error": "no"}),
        line({"id": "a", "score": "6", "outcome": "scored", "reason": None, "scorers": {}, "seconds": 0.1}),
        line({"id": "a", "score": 6.0}),
        line({"id": "a", "score": None, "outcome": "scored", "reason": None, "scorers": {}, "seconds": 0.1}),
        line({"id": "a", "score": 6.0, "outcome": "timeout", "reason": None, "scorers": {}, "seconds": 0.1}),
        line({"id": "b", "score": 6.0, "outcome": "scored", "reason": None, "scorers": {}, "seconds": 0.1}),
    ],
    ids=lambda reply: repr(reply.body[:30]),
)
async def test_an_answer_that_cannot_be_read_is_not_asked_for_again(server: FaultyServer, reply: Reply) -> None:
    server.reply = lambda request, number: reply
    async with RewardClient(server.origin) as client:
        with pytest.raises(ProtocolError):
            await client.score({**SAMPLE, "id": "a"})
    assert len(server.requests) == 1


async def test_half_of_a_surrogate_pair_becomes_the_replacement_character(server: FaultyServer) -> None:
    async with RewardClient(server.origin) as client:
        result = await client.score({"id": "\ud800", "response": "\ud800 \xe9 \U0001f600", "extra_info": {"\udc00": 1}})
    sent = server.requests[0].body["samples"][0]
    assert (sent["response"], sent["extra_info"]) == ("\ufffd \xe9 \U0001f600", {"\ufffd": 1})
    assert result.id == sent["id"] == "\ufffd"


async def test_a_group_without_its_results_is_an_error(server: FaultyServer) -> None:
    server.reply = lambda request, number: line({"id": request.body["groups"][0]["id"], "results": {}})
    async with RewardClient(server.origin) as client:
        with pytest.raises(ProtocolError, match="no result of a group of 1"):
            await client.score_group([SAMPLE])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
POSITIONS = st.dictionaries(st.sampled_from(["0", "00", "1", "7", "-1", "x", "\u0663"]), JSON, max_size=3)
RESULTS = st.fixed_dictionaries(
    {"id": st.just("a") | JSON},
    optional={"score": JSON, "outcome": JSON, "reason": JSON, "scorers": JSON, "seconds": JSON, "error": JSON},
)
REPLIES = st.builds(
    Reply,
    status=st.sampled_from([200, 202, 301, 400, 401, 404, 409, 410, 413, 422, 429, 500, 503]),
    body=st.binary(max_size=40)
    | RESULTS.map(lambda value: json.dumps(value).encode() + b"\n")
    | st.builds(lambda samples, message: {"error": {"samples": samples, "message": message}}, POSITIONS | JSON, JSON)
    | JSON,
    headers=st.dictionaries(
        st.sampled_from(["retry-after", "content-encoding", "location"]),
        st.sampled_from(["0", "-1", "nan", "inf", "soon", "1e300", "gzip", "br", "identity"]),
    ),
    cut=st.sampled_from(["", "", "before", "middle"]),
)


async def test_whatever_a_service_answers_the_call_ends_in_time_and_asks_seldom() -> None:
    async def one(replies: list[Reply]) -> None:
        async with FaultyServer("/v1/score", "/v1/groups") as server:
            server.reply = lambda request, number: replies[number % len(replies)]
            async with RewardClient(server.origin, timeout_s=0.25) as client:
                calls = [client.score({**SAMPLE, "id": own}) for own in ("a", "b")]
                ended = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20.0)
            assert [each for each in ended if isinstance(each, Exception) and not isinstance(each, RewardError)] == []
            assert len(server.requests) < 20

    @given(st.lists(REPLIES, min_size=1, max_size=3))
    def holds(replies: list[Reply]) -> None:
        asyncio.run(one(replies))

    await asyncio.to_thread(holds)


async def test_a_wrong_address_is_warned_of_with_where_the_right_one_is(
    closed_port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plaudit_client.client._WARN_AFTER_S", 0.0)
    async with RewardClient(f"http://127.0.0.1:{closed_port}", timeout_s=0.4) as client:
        with pytest.raises(RewardError, match=f"cannot reach http://127.0.0.1:{closed_port}: connection refused"):
            await client.score(SAMPLE)
    (record,) = caplog.records
    assert record.getMessage() == (
        f"cannot reach http://127.0.0.1:{closed_port}: connection refused; waiting up to 0.4 s. "
        "The address of a local service is in runs/<run>/service.json"
    )
    assert (record.name, record.levelno) == ("plaudit_client", logging.WARNING)


def test_an_outage_is_warned_of_after_five_seconds_and_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    outage = Outage("http://h:1", 1800.0, lambda: now[0])
    for now[0], message in ((4.0, "a"), (5.0, "b"), (30.0, "c"), (66.0, "d")):
        outage.note(message, began=now[0] - 4.0)
    outage.end()
    for now[0], message in ((130.0, "e"), (134.0, "f"), (136.0, "g")):
        outage.note(message, began=now[0])
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == ["b", "d", "g"]


@pytest.mark.parametrize("url", ["", "127.0.0.1:8710", "http://", "http://h:99999", "ftp://h", "http://[::1"])
def test_an_address_that_is_none_is_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match=r"url .* local service is in runs/<run>/service\.json"):
        RewardClient(url)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_wait_that_is_none_is_refused_at_once(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"timeout_s .* above 0"):
        SyncRewardClient("http://h:1", timeout_s=seconds)


async def test_only_the_sender_of_a_bad_sample_gets_the_error(server: FaultyServer) -> None:
    client = SyncRewardClient(server.origin)
    with pytest.raises(InvalidSampleError, match="sample 1: response: give the generated text"):
        await asyncio.to_thread(lambda: list(client.score_many([SAMPLE, {"response": 5}])))
    assert (await asyncio.to_thread(client.score, SAMPLE)).score == 6.0
    await asyncio.to_thread(client.close)
