"""A stored sample is read as its conversation: turns with times and rewards, tool calls with outcomes, and results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from builders import make_body, make_generation, make_prompt, make_sample
from plaudit_metrics.sources.samples import SampleDetail, detail, listed
from plaudit_metrics.sources.search import SampleFile
from plaudit_wire.records import (
    AgentReward,
    CallRecord,
    GroupRecord,
    SandboxRecord,
    ScorerRecord,
    ScoringRecord,
    Stamps,
    TurnRecord,
)
from plaudit_workers.stored_samples import store_groups
from plaudit_workers.stream.groups import Group, GroupSample

MESSAGES = [{"role": "system", "content": "Use the tools."}, {"role": "user", "content": "6 * 7?"}]
COMPLETION = [
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "multiply",
        "tool_calls": [{"function": {"name": "multiply", "arguments": {"a": 6, "b": 7}}}],
    },
    {"role": "tool", "name": "multiply", "content": "42"},
    {"role": "assistant", "content": "42"},
]
TURNS = [
    TurnRecord(0, 9, 0.0, 1.5, calls=[CallRecord("multiply", "ok", 1.5, 0.25)]),
    TurnRecord(12, 3, 2.0, 0.5),
]


def stored_row(
    folder: Path,
    scorers: dict[str, ScorerRecord] | None = None,
    generation: dict[str, Any] | None = None,
    **of_sample: Any,
) -> dict[str, Any]:
    prompt = make_prompt(messages=MESSAGES, ground_truth="42")
    sample = make_sample(**{"response": "42", "messages": MESSAGES, "completion": COMPLETION, **of_sample})
    generated = make_generation(turns=TURNS if sample.completion else [], **(generation or {}))
    body = make_body(prompt, sample=sample, generation=generated)
    scoring = ScoringRecord("scored", 1.0, scorers=scorers or {})
    stamps = Stamps(1000.0, 1001.0, 1005.0, 1005.0, 1005.0, 1006.0)
    group = Group(prompt.group, "ready", prompt, [GroupSample(0, stamps, body, scoring=scoring)], 1, 1000.0)
    record = GroupRecord(prompt.group, "train", 1, "trained", 1, 1, 1000.0, 1010.0, 1006.0, 1006.0, 1007.0)
    with SampleFile(store_groups(folder, 1, 1, [group], {prompt.group: record})) as file:
        return file.read(0)


def test_the_times_of_its_machine_are_stored_and_read(tmp_path: Path) -> None:
    machine = SandboxRecord(1.0, claim_s=0.5, wait_s=0.25, exec_s=0.75, num_commands=3, cpus=2.0)
    row = stored_row(tmp_path, generation={"tool_s": 2.5, "sandbox": machine})
    found = detail(row, 1000)
    assert found.sandbox == machine
    assert (found.stages_s["sandboxes"], found.stages_s["tools"]) == (1.75, 0.75)
    assert detail(stored_row(tmp_path / "plain"), 1000).sandbox is None


def as_json(found: SampleDetail) -> Any:
    return msgspec.json.decode(msgspec.json.encode(found))


def test_turns_calls_and_results_follow_each_other_with_their_times(tmp_path: Path) -> None:
    row = stored_row(tmp_path, turn_rewards=[0.0, 1.0], agent_reward=AgentReward("scored", 1.0))
    found = as_json(detail(row, 1000))
    assert [message["content"]["text"] for message in found["prompt"]] == ["Use the tools.", "6 * 7?"]
    first, result, last = found["completion"]
    assert first["reasoning"]["text"] == "multiply"
    assert first["calls"] == [
        {"tool": "multiply", "arguments": {"text": '{"a":6,"b":7}', "characters": 13}, "outcome": "ok"}
        | {"started_s": 1.5, "call_s": 0.25}
    ]
    assert (first["tokens"], first["generate_s"], first["reward"]) == (9, 1.5, 0.0)
    assert (result["role"], result["name"], result["content"]["text"]) == ("tool", "multiply", "42")
    assert (last["started_s"], last["reward"]) == (2.0, 1.0)
    assert found["agent"]["agent_reward"] == {"outcome": "scored", "value": 1.0}
    assert found["sample"]["turns"] == 2
    assert sum(found["stages_s"].values()) == 1007.0 - 1000.0


@pytest.mark.parametrize(
    ("calls", "shown"),
    [
        (5, [("", "5")]),
        ({"name": "f"}, [("f", "")]),
        (["f"], [("", "f")]),
        ([{"function": "f"}, {"function": {"name": 7, "arguments": [1]}}], [("", '{"function":"f"}'), ("7", "[1]")]),
    ],
)
def test_calls_of_any_form_are_shown(tmp_path: Path, calls: Any, shown: list[tuple[str, str]]) -> None:
    row = stored_row(tmp_path, completion=[{"role": "assistant", "content": "", "tool_calls": calls}])
    (message,) = detail(row, 1000).completion
    assert [(call.tool, call.arguments.text) for call in message.calls] == shown


def test_a_single_response_is_a_conversation_of_one_turn(tmp_path: Path) -> None:
    row = stored_row(tmp_path, completion=[])
    assert [(message.role, message.content.text) for message in detail(row, 1000).completion] == [("assistant", "42")]
    assert listed(row).turns == 1


def test_scorers_have_their_values_reasons_and_extras(tmp_path: Path) -> None:
    judge = ScorerRecord("scored", 0.5, "fair", call_s=2.0, extra={"acc": 1.0, "verdict": "B"})
    failed = ScorerRecord("timeout", None, "slow", attempts=3)
    assert detail(stored_row(tmp_path, {"judge": judge, "rule": failed}), 1000).scorers == {
        "judge": judge,
        "rule": failed,
    }


def test_long_texts_are_cut_and_their_length_is_known(tmp_path: Path) -> None:
    row = stored_row(tmp_path, completion=[], response="x" * 1_000_000)
    (cut,) = detail(row, 20_000).completion
    assert (len(cut.content.text), cut.content.characters) == (20_000, 1_000_000)
    assert len(listed(row).response) < 1000


def test_samples_of_one_prompt_share_its_id_and_others_do_not(tmp_path: Path) -> None:
    row = stored_row(tmp_path)
    assert listed(row).prompt_id == listed(stored_row(tmp_path, response="41")).prompt_id
    assert listed(row).prompt == "6 * 7?"
    assert len(listed(row).prompt_id) == 16


def test_a_sample_of_an_older_version_is_read_without_the_columns_that_came_later(tmp_path: Path) -> None:
    row = stored_row(tmp_path)
    for column in ("messages_json", "completion_json", "turns_json", "agent_json", "prompt_id", "max_tokens"):
        del row[column]
    found = detail(row, 1000)
    assert [(message.role, message.content.text) for message in found.prompt] == [("prompt", "copy 12")]
    assert [message.content.text for message in found.completion] == ["42"]
    assert found.sample.prompt_id == ""
