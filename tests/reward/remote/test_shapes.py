"""Requests and answers of each shape over real HTTP: a value, a typed failure or an error, never an invented zero."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import faulty_server as faults
from faulty_server import Reply
from plaudit_reward.attempts import Rules, Stage
from plaudit_reward.endpoint.access import CircuitOpenError, EndpointRefusedError, EndpointUsage
from plaudit_reward.endpoint.budget import Limiter, LocalBudget, RateLimits
from plaudit_reward.endpoint.remote import RemoteClient, RemoteScorer
from plaudit_reward.endpoint.shapes import SHAPES, MalformedAnswerError, ShapeName
from plaudit_reward.pipeline import Pipeline
from plaudit_reward.scorer import Attempt, Score
from plaudit_wire.errors import CallTimeoutError, ConfigurationError, DataError, InfrastructureError
from plaudit_wire.records import Sample

SAMPLE = Sample(
    "t-0-1.0",
    3,
    "math",
    "2 + 2?",
    "It is 4.",
    ground_truth="4",
    extra_info={"expected_answer": "4"},
    messages=[{"role": "user", "content": "2 + 2?"}],
)
Ask = Callable[..., Any]


@pytest.fixture
async def server() -> AsyncIterator[Any]:
    async with faults.FaultyServer("/reward") as server:
        yield server


@pytest.fixture
async def make_scorer(server: Any) -> AsyncIterator[Callable[..., Any]]:
    made: list[RemoteScorer] = []

    async def make(shape: ShapeName, **client: Any) -> RemoteScorer:
        usage = client.pop("usage", EndpointUsage())
        remote = RemoteClient(f"{server.origin}/reward", SHAPES[shape], usage, **client)
        made.append(RemoteScorer("remote", remote, Limiter(LocalBudget(RateLimits()), "remote")))
        await made[-1].open()
        return made[-1]

    yield make
    for scorer in made:
        await scorer.close()


@pytest.fixture
def ask(server: Any, make_scorer: Callable[..., Any]) -> Ask:
    """Score ``SAMPLE`` by an endpoint of a shape that gives this answer."""

    async def score(shape: ShapeName, answer: Any, sample: Sample = SAMPLE, **client: Any) -> Score:
        server.reply = lambda request, number: answer if isinstance(answer, Reply) else Reply(body=answer)
        scorer = await make_scorer(shape, **client)
        result: Score = await scorer.score(sample, Attempt(5.0))
        return result

    return score


REQUESTS: dict[ShapeName, dict[str, Any]] = {
    "plaudit": {
        "id": "t-0-1.0/3/a8345a164e24",
        "response": "It is 4.",
        "prompt": SAMPLE.messages,
        "data_source": "math",
        "ground_truth": "4",
        "extra_info": {"expected_answer": "4"},
    },
    "slime": {
        "prompt": SAMPLE.messages,
        "response": "It is 4.",
        "label": "4",
        "metadata": {"expected_answer": "4"},
    },
    "openrlhf": {"query": ["2 + 2?It is 4."], "prompts": ["2 + 2?"], "labels": ["4"]},
    "nemo-gym": {"expected_answer": "4", "responses_create_params": {"input": SAMPLE.messages}},
    "sandbox-fusion": {"dataset": "math", "id": "t-0-1.0/3", "completion": "It is 4.", "config": {}},
}
ANSWERS: dict[ShapeName, Any] = {
    "plaudit": {"id": "t-0-1.0/3", "score": 0.5, "outcome": "scored", "scorers": {"exact": {"value": 1.0}}},
    "slime": 0.5,
    "openrlhf": {"rewards": [0.5], "scores": [1.0], "extra_logs": {"exact": [1.0]}},
    "nemo-gym": {"reward": 0.5, "reward_components": {"exact": 1.0}, "response": {}},
    "sandbox-fusion": {"id": 1, "accepted": True, "tests": []},
}


@pytest.mark.parametrize("shape", SHAPES)
async def test_an_endpoint_gets_the_request_of_its_shape_and_its_answer_is_the_value(
    shape: ShapeName, ask: Ask, server: Any
) -> None:
    score = await ask(shape, ANSWERS[shape], arguments={"config": {"run_timeout": 5}}, api_key="hush")
    assert score.value == (1.0 if shape == "sandbox-fusion" else 0.5)
    assert score.extra.get("exact", 1.0) == 1.0
    sent = server.requests[-1].body
    assert server.requests[-1].headers["authorization"] == "Bearer hush"
    assert sent.pop("config") == {"run_timeout": 5}
    answered = sent.pop("response") if shape == "nemo-gym" else None
    expected = {name: value for name, value in REQUESTS[shape].items() if name != "config"}
    assert sent == expected
    if answered:
        assert answered["output"][0]["content"][0]["text"] == "It is 4."


async def test_sandbox_fusion_gets_the_problem_that_the_row_holds(ask: Ask, server: Any) -> None:
    sample = Sample("g", 0, "humaneval", "p", "r", ground_truth={"test": "assert f()"}, extra_info={"id": 17})
    assert (await ask("sandbox-fusion", {"accepted": False}, sample)).value == 0.0
    body = server.requests[-1].body
    assert (body["id"], body["config"]) == (17, {"provided_data": {"test": "assert f()"}})


@pytest.mark.parametrize(
    ("outcome", "ours"),
    [
        ("infra_error", "infra_error"),
        ("data_error", "data_error"),
        ("timeout", "timeout"),
        ("skipped", "skipped"),
        ("poison", "infra_error"),
        ("given_up", "infra_error"),
    ],
)
async def test_a_typed_failure_of_a_reward_service_stays_one(outcome: str, ours: str, ask: Ask) -> None:
    score = await ask("plaudit", {"id": "x", "score": None, "outcome": outcome, "reason": "no judge"})
    assert (score.outcome, score.value, score.reason) == (ours, None, "no judge")


@pytest.mark.parametrize(
    ("shape", "answer", "message"),
    [
        ("plaudit", {"score": 1.0}, "no 'outcome'"),
        ("plaudit", {"outcome": "great", "score": 1.0}, "outcome is 'great'"),
        ("plaudit", {"outcome": "scored"}, "no 'score'"),
        ("plaudit", [1.0], "not an object with 'outcome'"),
        ("slime", {"value": 1.0}, "without score or reward .*http.jsonPath"),
        ("openrlhf", {"scores": [1.0]}, "no 'rewards'"),
        ("openrlhf", {"rewards": []}, "'rewards' has 0 items"),
        ("nemo-gym", {"detail": "?"}, "no 'reward'"),
        ("sandbox-fusion", {"accepted": "yes"}, "'accepted' is 'yes'"),
        ("slime", b"<html>", "not JSON: <html>"),
    ],
)
async def test_an_answer_of_another_shape_is_an_infrastructure_error(
    shape: ShapeName, answer: Any, message: str, ask: Ask
) -> None:
    with pytest.raises(MalformedAnswerError, match=rf"http://127.*/reward: .*{message}"):
        await ask(shape, answer)


@pytest.mark.parametrize(
    ("shape", "answer", "message"),
    [
        ("slime", None, "its answer is null"),
        ("openrlhf", {"rewards": [None]}, "its answer is null"),
        ("nemo-gym", {"reward": "high"}, "'high', which is not a number"),
        ("plaudit", {"outcome": "scored", "score": None}, "its answer is null"),
        ("slime", b"1e999", "null, or a number that is not finite"),
        ("slime", str(10**30).encode(), "beyond 64 bits"),
        ("slime", b"9" * 5000, "cannot be read"),
        ("slime", b"[" * 100_000, "cannot be read"),
        ("slime", b'{"score": 1, "other": ' + b"[" * 100_000, "cannot be read"),
        ("slime", b'{"score": "\\ud800"}', "is not a number"),
        ("openrlhf", b'{"rewards": [NaN]}', "null, or a number that is not finite"),
        ("slime", b"-Infinity", "null, or a number that is not finite"),
        ("slime", b'{"score": 1, "more": {"n": [0, 100000000000000000000]}}', r"more.n\[1\]: is an integer beyond 64"),
        (
            "slime",
            b'{"score": 1, "more": ' + b"[" * 99 + b"]" * 99 + b"}",
            r"more\[0\].* is nested more than 64 levels",
        ),
        ("slime", b'{"score": 1, "more": [' + b"[]," * 300_000 + b"[]]}", "is larger than 4 Mi characters"),
        ("slime", Reply(422, {"detail": "no label"}), "responded 422: no label"),
    ],
)
async def test_an_answer_without_a_finite_number_is_a_data_error(
    shape: ShapeName, answer: Any, message: str, ask: Ask
) -> None:
    with pytest.raises(DataError, match=message):
        await ask(shape, Reply(body=answer) if not isinstance(answer, Reply) else answer)


@pytest.mark.parametrize("answer", [b'{"\\ud800": 1}', b'{"outcome": "skipped", "reason": "\\ud800"}', b"[" * 100_000])
@pytest.mark.parametrize("shape", ["plaudit", "slime", "openrlhf", "nemo-gym", "sandbox-fusion"])
async def test_whatever_is_answered_the_result_can_be_stored(
    answer: bytes, shape: ShapeName, server: Any, make_scorer: Callable[..., Any]
) -> None:
    server.reply = lambda request, number: Reply(body=answer)
    scoring = await Pipeline([Stage(await make_scorer(shape), Rules(retries=0))]).score(SAMPLE)
    assert scoring.value is None
    msgspec.msgpack.encode(scoring)


async def test_a_reward_of_nemo_gym_that_measures_nothing_is_no_zero(ask: Ask) -> None:
    failed = {"reward": 0.0, "mask_sample": True, "failure_kind": "judge_failed", "failure_reason": "timed out"}
    with pytest.raises(InfrastructureError, match=r"masks this sample \(judge_failed: timed out\)"):
        await ask("nemo-gym", failed)
    assert (await ask("nemo-gym", {"reward": 0.0, "mask_sample": False})).value == 0.0


async def test_extras_that_are_not_finite_are_left_out(ask: Ask) -> None:
    answer = Reply(
        body=b'{"rewards": [1.0], "extra_logs": {"kl": [Infinity], "acc": [NaN], "f1": [1e400], "length": [3]}}'
    )
    score = await ask("openrlhf", answer)
    assert (score.value, score.extra) == (1.0, {"length": 3.0})


async def test_a_path_finds_the_score_in_any_answer(ask: Ask) -> None:
    assert (await ask("slime", {"result": [{"points": 3}]}, path="$.result[0].points")).value == 3.0
    with pytest.raises(MalformedAnswerError, match=r"\$.result finds nothing: no member 'result'"):
        await ask("slime", {"points": 3}, path="$.result")
    with pytest.raises(ConfigurationError, match=r"http.jsonPath 'result' does not begin with \$"):
        await ask("slime", 1, path="result")


async def test_a_wrong_address_opens_the_circuit_at_once_and_an_outage_after_five_failures(
    server: Any, make_scorer: Callable[..., Any], ask: Ask
) -> None:
    with pytest.raises(EndpointRefusedError, match=r"404: gone \(check http.url: it includes the route\)"):
        await ask("slime", Reply(404, {"detail": "gone"}))
    usage = EndpointUsage()
    scorer = await make_scorer("slime", usage=usage)
    await server.stop()
    for _ in range(5):
        with pytest.raises(InfrastructureError, match="Connection refused"):
            await scorer.score(SAMPLE, Attempt(5.0))
    assert scorer.circuit_open
    assert scorer.room() == 0
    with pytest.raises(CircuitOpenError):
        await scorer.score(SAMPLE, Attempt(5.0))
    assert usage.requests == {"unreachable": 5}
    server.reply = lambda request, number: Reply(body=0.25)
    await server.start()
    scoring = await Pipeline([Stage(scorer, Rules(retries=3))]).score(SAMPLE)
    assert scoring.value == 0.25


async def test_a_key_never_appears_in_a_reason(ask: Ask) -> None:
    with pytest.raises(InfrastructureError) as error:
        await ask("slime", {"you sent": "hush-hush"}, api_key="hush-hush")
    assert "hush-hush" not in str(error.value)


class SessionServer:
    """A resources server whose reward is what the sample's session was seeded with."""

    def __init__(self, seed_status: int = 200, after_s: float = 0.0) -> None:
        self.seeded: list[dict[str, Any]] = []
        self._values: dict[str, Any] = {}
        self._seed_status, self._after_s = seed_status, after_s

    async def seed(self, request: web.Request) -> web.Response:
        if self._seed_status != 200:
            return web.json_response({"detail": "no room"}, status=self._seed_status)
        row = await request.json()
        self.seeded.append(row)
        name = f"session-{len(self.seeded)}"
        await asyncio.sleep(self._after_s)
        self._values[name] = row["expected_answer"]
        response = web.json_response({})
        response.set_cookie("session", name, path="/", httponly=True)
        response.set_cookie("shard", "b")
        return response

    async def verify(self, request: web.Request) -> web.Response:
        value = self._values.pop(request.cookies.get("session", ""), None)
        if value is not None and request.cookies.get("shard") != "b":
            value = None
        return web.json_response({"reward": -1.0 if value is None else float(value)})


@pytest.fixture
async def score_by() -> AsyncIterator[Callable[..., Any]]:
    """Scores samples by a resources server, all at the same time."""
    ended = contextlib.AsyncExitStack()

    async def score_by(server: SessionServer, *samples: Sample, limit_s: float = 5.0, **client: Any) -> list[Any]:
        application = web.Application()
        application.add_routes([web.post("/gym/seed_session", server.seed), web.post("/gym/verify", server.verify)])
        serving = TestServer(application)
        await serving.start_server()
        ended.push_async_callback(serving.close)
        usage = client.pop("usage", EndpointUsage())
        remote = RemoteClient(str(serving.make_url("/gym/verify")), SHAPES["nemo-gym"], usage, **client)
        ended.push_async_callback(remote.close)
        return await asyncio.gather(*(remote.score(each, limit_s) for each in samples), return_exceptions=True)

    async with ended:
        yield score_by


async def test_each_sample_is_verified_in_the_session_that_its_row_seeded(score_by: Callable[..., Any]) -> None:
    server, usage = SessionServer(after_s=0.05), EndpointUsage()
    samples = [msgspec.structs.replace(SAMPLE, index=n, extra_info={"expected_answer": n}) for n in range(1, 9)]
    scores = await score_by(server, *samples, usage=usage, arguments={"level": 2})
    assert [score.value for score in scores] == [float(n) for n in range(1, 9)]
    assert sorted(row["expected_answer"] for row in server.seeded) == list(range(1, 9))
    assert all(row.keys() == {"expected_answer", "responses_create_params", "level"} for row in server.seeded)
    assert usage.requests == {"200": 16}


@pytest.mark.parametrize("status", [404, 405])
async def test_a_server_without_sessions_is_asked_to_verify_only(status: int, score_by: Callable[..., Any]) -> None:
    (score,) = await score_by(SessionServer(status), SAMPLE)
    assert score.value == -1.0


@pytest.mark.parametrize(
    ("status", "error"), [(500, InfrastructureError), (422, DataError), (401, EndpointRefusedError)]
)
async def test_a_session_that_cannot_be_opened_is_typed_and_nothing_is_verified(
    status: int, error: type[Exception], score_by: Callable[..., Any]
) -> None:
    (failure,) = await score_by(SessionServer(status), SAMPLE)
    assert isinstance(failure, error)
    assert f"/gym/seed_session responded {status}: no room" in str(failure)


async def test_opening_a_session_is_part_of_the_samples_time(score_by: Callable[..., Any]) -> None:
    (failure,) = await score_by(SessionServer(after_s=5.0), SAMPLE, limit_s=0.2)
    assert isinstance(failure, CallTimeoutError)
