"""The way of plain data: past the gate it reaches scorers, files, page and another scoring as it was, or is refused."""

from __future__ import annotations

import io
import itertools
import json
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import httpx
import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builders import make_body, make_generation, make_prompt, make_sample
from fuzzed_house import WITHIN_S, House
from outside_values import PLAIN, TEXTS, VALUES, with_member
from plaudit_job.data_row import DataRow, data_row
from plaudit_reward.functions.result import to_score
from plaudit_wire.messages import Prompt, SampleBody, decode, decode_body, encode, encode_body
from plaudit_wire.plain import PlainDataError
from plaudit_wire.records import CallRecord, GroupRecord, ScorerRecord, ScoringRecord, Stamps, TurnRecord
from plaudit_workers.agents.messages import Trajectory
from plaudit_workers.cli import main
from plaudit_workers.commands.rescore_rows import stored_groups
from plaudit_workers.stored_samples import store_groups
from plaudit_workers.stream.groups import Group, GroupSample

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "4"},
]
ROW = {"data_source": "openai/gsm8k", "prompt": MESSAGES[:1], "reward_model": {"ground_truth": "4"}, "extra_info": {}}


def conversations(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Messages in which single members, also of calls, are other values."""
    function = CALL["function"]
    calls = with_member(function, values).map(lambda each: {**CALL, "function": each}) | with_member(CALL, values)
    calling = (st.lists(calls | values, max_size=2) | values).map(lambda each: {**MESSAGES[1], "tool_calls": each})
    messages = st.sampled_from(MESSAGES)
    return st.lists(messages | messages.flatmap(lambda each: with_member(each, values)) | calling, max_size=3)


def ways(values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    """A row, and what an agent, a policy and a reward function make of it."""
    row = st.builds(
        lambda prompt, truth, extra: {
            **ROW,
            "prompt": prompt or "2 + 2?",
            "reward_model": {"ground_truth": truth},
            "extra_info": {"n": extra},
        },
        conversations(values),
        values,
        values,
    )
    return st.tuples(row, conversations(values), values, TEXTS, values)


STAMPS = Stamps(1.0, 1.1, 1.3, score_taken=1.5, committed=1.7)
JOB = """
apiVersion: plaudit.dev/v1alpha1
kind: RLJob
metadata: {name: again}
spec: {reward: {scorers: [{name: right, kind: rule, rule: gsm8k}], workers: {processes: 1}}}
"""
steps = itertools.count(1_000_000)


def refused(error: PlainDataError, *columns: str) -> None:
    """Assert that a refusal names its place and the remedy."""
    assert error.where.startswith(columns), error
    assert error.remedy


def judged(row: dict[str, Any]) -> DataRow | None:
    """Return a row past the gate; None where it is refused by name."""
    try:
        return data_row(row)
    except PlainDataError as error:
        refused(error, "prompt", "reward_model", "extra_info")
        return None


def conversation(messages: list[dict[str, Any]], environment: object) -> Trajectory | None:
    """Return what an agent's program wrote past its gate; None where it is refused by name."""
    trajectory = Trajectory(messages=messages, environment={"state": environment})
    try:
        trajectory.make_plain()
    except PlainDataError as error:
        refused(error, "messages", "environment")
        return None
    return trajectory


def travelled(prompt: Prompt, body: SampleBody) -> tuple[Prompt, SampleBody]:
    """Return both as the next process reads them from Redis, which must be as they were."""
    parts = encode_body(body)
    read = decode(encode(prompt), Prompt), decode_body(parts.tensors, parts.sample, parts.generation)
    assert read == (prompt, body)
    return read


@settings(suppress_health_check=list(HealthCheck))
@given(ways(PLAIN) | ways(VALUES))
def test_what_passed_the_gate_is_stored_shown_and_scored_again_as_it_was(house: House, way: tuple[Any, ...]) -> None:
    row, messages, environment, response, returned = way
    passed, spoken = judged(row), conversation(messages, environment)
    scored = to_score({"score": 1.0, "note": returned})
    if passed is None or spoken is None:
        return
    texts = Trajectory(response=response)
    texts.make_plain()
    step = next(steps)
    chat = passed.prompt if isinstance(passed.prompt, list) else []
    prompt = make_prompt(
        f"t-{step}-1.0",
        n=1,
        data_source=passed.data_source,
        messages=chat,
        ground_truth=passed.ground_truth,
        extra_info=passed.extra_info,
    )
    sample = make_sample(
        texts.response or "",
        group=prompt.group,
        data_source=prompt.data_source,
        ground_truth=prompt.ground_truth,
        extra_info=prompt.extra_info,
        messages=chat,
        completion=spoken.messages,
        environment=spoken.environment,
        response_tokens=3,
    )
    turns = [TurnRecord(0, 3, 0.0, 0.1, calls=[CallRecord("f", "ok", 0.1, 0.1)])]
    body = make_body(prompt, sample=sample, generation=make_generation(turns=turns))
    prompt, body = travelled(prompt, body)
    scoring = ScoringRecord(
        "scored", scored.value, scorers={"mine": ScorerRecord("scored", scored.value, extra=scored.extra)}
    )
    group = Group(prompt.group, "ready", prompt, [GroupSample(0, STAMPS, body, scoring=scoring)], 1, 1.0, 1.8, 1.9)
    record = GroupRecord(group.id, "train", step, "trained", 1, 1, 1.0, 2.5, terminal=1.8, ready=1.9, taken=2.0)
    with house.holding():
        file = store_groups(house.folder / "samples", step, 1, [group], {group.id: record})
        try:
            ((again,),) = stored_groups([file])
            sent = msgspec.structs.replace(sample, messages=again.sample.messages)
            assert again.sample == msgspec.structs.replace(sent, max_tokens=prompt.sampling.max_tokens)
            assert again.sample.messages == chat
            _is_shown(house, step, group.id, sample)
            _is_scored_again(house, str(file))
        finally:
            file.unlink()


def _is_shown(house: House, step: int, group: str, sample: Any) -> None:
    url = f"{house.metrics}/api/v1/samples"
    listed = httpx.get(url, params={"first_step": step, "last_step": step}, timeout=WITHIN_S)
    assert [each["group"] for each in listed.json()["samples"]] == [group], listed.text
    answer = httpx.get(f"{url}/{step}/{group}/0", params={"characters": 4_000_000}, timeout=WITHIN_S)
    assert answer.status_code == 200, answer.text
    shown = answer.json()
    truth = sample.ground_truth
    text = truth if isinstance(truth, str) else "" if truth is None else msgspec.json.encode(truth).decode()
    assert shown["ground_truth"]["text"] == text
    assert msgspec.json.decode(shown["extra_info"]["text"]) == sample.extra_info
    expected = [str(message.get("role", "")) for message in sample.completion] or ["assistant"]
    assert [message["role"] for message in shown["completion"]] == expected
    if not sample.completion:
        assert shown["completion"][0]["content"]["text"] == sample.response


def _is_scored_again(house: House, samples: str) -> None:
    job, output = house.folder / "again.yaml", house.folder / "again.jsonl"
    job.write_text(JOB)
    said = io.StringIO()
    with redirect_stderr(said), redirect_stdout(said):
        code = main(["rescore", samples, "--job", str(job), "--output", str(output)])
    assert code == 0, said.getvalue()
    assert "Traceback" not in said.getvalue()
    assert len([json.loads(line) for line in output.read_bytes().splitlines()]) == 1
