"""Adapters against a real HTTP server: what each trainer passes becomes a sample, and a failure never a zero."""

import asyncio
import inspect
import json
import logging
import math
import pickle
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from faulty_server import FaultyServer, Reply, Request
from plaudit_client import NoScoreError, Result
from plaudit_client.adapters import verifiers, verl
from plaudit_client.adapters.service import MissingScores, number
from plaudit_client.adapters.trl import reward

MESSAGES = [{"role": "user", "content": "2 + 2?"}]


def result(sample: dict[str, Any]) -> dict[str, Any]:
    """Score the length of a response; a response ``fail`` has no score."""
    failed = sample["response"] == "fail"
    return {
        "id": sample.get("id", ""),
        "score": None if failed else float(len(sample["response"])),
        "outcome": "infra_error" if failed else "scored",
        "reason": "the judge is down" if failed else None,
        "scorers": {},
        "seconds": 0.5,
    }


def answer(request: Request) -> Reply:
    if "samples" in request.body:
        answers = [result(sample) for sample in request.body["samples"]]
    else:
        answers = [
            {"id": group["id"], "results": [result(sample) for sample in group["samples"]]}
            for group in request.body["groups"]
        ]
    return Reply(body=b"".join(json.dumps(each).encode() + b"\n" for each in answers))


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FaultyServer]:
    async with FaultyServer("/v1/score", "/v1/groups") as server:
        server.reply = lambda request, number: answer(request)
        monkeypatch.setenv("PLAUDIT_URL", server.url.removesuffix("/v1"))
        monkeypatch.setenv("PLAUDIT_TOKEN", "secret")
        yield server


def sent(server: FaultyServer) -> list[dict[str, Any]]:
    return [sample for request in server.requests for sample in request.body["samples"]]


async def test_trl_gets_a_value_for_each_completion_and_none_for_a_failure(server: FaultyServer) -> None:
    logged: dict[str, Any] = {}
    function = reward(data_source="gsm8k")
    rewards = await function(
        prompts=["a", "a", "b"],
        completions=["four", "fail", ""],
        completion_ids=[[1, 2], [3], []],
        answer=["4", "4", "5"],
        level=[1, 1, None],
        trainer_state=SimpleNamespace(global_step=3),
        log_extra=lambda name, values: logged.update({name: values}),
        log_metric=lambda name, value: logged.update({name: value}),
    )
    assert rewards == [4.0, None, 0.0]
    first = next(sample for sample in sent(server) if sample["response"] == "four")
    assert first["ground_truth"] == "4"
    assert first["response_tokens"] == 2
    assert (first["data_source"], first["prompt"]) == ("gsm8k", "a")
    assert first["extra_info"] == {"answer": "4", "level": 1}
    assert logged["plaudit_outcome"] == ["scored", "infra_error", "scored"]
    assert logged["plaudit/no_score"] == pytest.approx(1 / 3)


async def test_trl_conversations_are_scored_by_their_last_reply(server: FaultyServer) -> None:
    turns = [{"role": "assistant", "content": "Let me see."}, {"role": "tool", "content": "4"}]
    completion = [*turns, {"role": "assistant", "content": [{"type": "text", "text": "four"}]}]
    assert await reward()(prompts=[MESSAGES], completions=[completion], solution=["4"]) == [4.0]
    assert sent(server)[0]["prompt"] == MESSAGES


async def test_trl_groups_are_scored_together(server: FaultyServer) -> None:
    function = reward(group_size=2)
    assert await function(prompts=["a", "a", "b", "b"], completions=["x", "fail", "xx", "xxx"]) == [1.0, None, 2.0, 3.0]
    groups = [group for request in server.requests for group in request.body["groups"]]
    assert [[sample["prompt"] for sample in group["samples"]] for group in groups] == [["a", "a"], ["b", "b"]]
    with pytest.raises(ValueError, match="group_size 2 does not divide a batch of 3"):
        await function(prompts=["a"] * 3, completions=["x"] * 3)


def test_the_function_for_trl_is_async_has_a_name_and_can_be_pickled() -> None:
    function = reward("http://127.0.0.1:1", token="t")
    for each in (function, pickle.loads(pickle.dumps(function))):
        assert inspect.iscoroutinefunction(each)
        assert each.__name__ == "plaudit"


async def test_verl_gets_a_number_with_the_same_columns_for_every_sample(server: FaultyServer) -> None:
    rows = [("four", "raise"), ("fail", -1.0), ("fail", "0.5")]
    scored = [await verl.compute_score("d", text, "4", {"index": 3, "tool": None}, on_failure=on) for text, on in rows]
    assert [each["score"] for each in scored] == [4.0, -1.0, 0.5]
    assert [each["scored"] for each in scored] == [1.0, 0.0, 0.0]
    assert scored[0].keys() == scored[1].keys()
    assert sent(server)[0]["extra_info"] == {"index": 3}


async def test_verl_is_told_of_a_failure_by_an_exception(server: FaultyServer) -> None:
    with pytest.raises(NoScoreError, match="infra_error: the judge is down"):
        await verl.compute_score("d", "fail", "4", reward_router_address="host:1", reward_model_tokenizer=object())


class TaskData:
    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def model_dump(self, **options: Any) -> dict[str, Any]:
        return self._fields


async def test_a_verifiers_trace_is_scored_by_its_last_reply_under_its_id(server: FaultyServer) -> None:
    task = TaskData(idx=3, data_source="d", answer="4", prompt="2 + 2?", timeout={}, level=2)
    trace = SimpleNamespace(
        id="trace-1", messages=[*MESSAGES, {"role": "assistant", "content": "four"}], last_reply="four", num_turns=1
    )
    assert await verifiers.score(task, trace) == 4.0
    (sample,) = sent(server)
    assert (sample["id"], sample["prompt"], sample["ground_truth"]) == ("trace-1", MESSAGES, "4")
    assert sample["extra_info"] == {"idx": 3, "answer": "4", "level": 2, "num_turns": 1}
    trace.last_reply, trace.id = "fail", "trace-2"
    with pytest.raises(NoScoreError):
        await verifiers.score(task, trace)


def missing(outcome: str, reason: str | None = None) -> Result:
    return Result("s", None, outcome, reason, {}, 1.0)


def test_missing_scores_are_warned_of_once_a_minute_for_each_outcome(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    scores = MissingScores(lambda: now[0])
    scores.note(Result("s", 1.0, "scored", None, {}, 1.0))
    for _ in range(3):
        scores.note(missing("timeout", "took 30 s"))
    scores.note(missing("infra_error", "the judge is down"))
    now[0] = 61.0
    scores.note(missing("timeout"))
    assert [record.getMessage() for record in caplog.records] == [
        "sample s has no score: timeout: took 30 s",
        "sample s has no score: infra_error: the judge is down",
        "sample s has no score: timeout: no reason given (2 more since the last warning of this outcome)",
    ]
    assert {(record.name, record.levelno) for record in caplog.records} == {("plaudit_client", logging.WARNING)}


async def test_adapters_warn_of_samples_without_a_score(
    server: FaultyServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = {
        "trl": lambda: reward()(prompts=["a"], completions=["fail"]),
        "verl": lambda: verl.compute_score("d", "fail", "4", on_failure=0.0),
    }
    for way, score in ways.items():
        monkeypatch.setattr("plaudit_client.adapters.service._OF_THIS_PROCESS", MissingScores())
        caplog.clear()
        await score()
        (record,) = caplog.records
        assert "has no score: infra_error: the judge is down" in record.getMessage(), way


async def test_a_missing_address_names_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLAUDIT_URL", raising=False)
    with pytest.raises(ValueError, match=r"give url, or set PLAUDIT_URL \(and PLAUDIT_TOKEN\)"):
        await verl.compute_score("d", "four", "4")


@pytest.mark.parametrize("value", ["zero", math.nan, "inf"])
def test_only_a_finite_number_may_stand_for_a_missing_score(value: Any) -> None:
    failed = Result("a", None, "timeout", "too slow", {}, 1.0)
    with pytest.raises(ValueError, match="give 'raise', or a finite number"):
        number(failed, value)


async def test_thousands_of_calls_share_one_client(server: FaultyServer) -> None:
    scored = await asyncio.gather(*(verl.compute_score("d", "x" * (n % 7), "4") for n in range(1000)))
    assert [each["score"] for each in scored] == [float(n % 7) for n in range(1000)]
    assert len(server.requests) < 50
