"""Read a run's stored samples: as records, as the lines of a list, or as one sample in full.

In full a sample is the conversation that it was: messages, tool calls and results, with the times of each turn. Long
texts are cut, so that one sample with megabytes of output costs a reader and a browser little.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pyarrow.compute
import pyarrow.parquet

from plaudit_metrics.sources import sample_schema
from plaudit_metrics.sources.sample_schema import Row, StoredAgentRewards
from plaudit_metrics.sources.steps import StepSamples
from plaudit_metrics.statistics.stages import stages_of
from plaudit_wire.records import (
    CallOutcome,
    CallRecord,
    GroupRecord,
    SampleRecord,
    SandboxRecord,
    ScorerRecord,
    TurnRecord,
)

MOST_CHARACTERS = 4_000_000
"""Characters of one sample that are returned when all of it is asked for."""


class CutText(msgspec.Struct, frozen=True):
    """The beginning of a text."""

    text: str
    characters: int
    """The length of the whole text; larger than that of ``text`` where it was cut."""


class TextBudget:
    """Cut the texts of one sample: each to ``characters``, all together to ``MOST_CHARACTERS``."""

    def __init__(self, characters: int) -> None:
        self._characters = characters
        self._left = MOST_CHARACTERS

    def cut(self, text: str) -> CutText:
        """Return the beginning of a text."""
        kept = text[: min(self._characters, self._left)]
        self._left -= len(kept)
        return CutText(kept, len(text))


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call that the policy made; its result is a later message with the role ``tool``."""

    tool: str
    arguments: CutText
    outcome: CallOutcome | None = None
    started_s: float | None = None
    """Seconds from the start of the sample."""
    call_s: float | None = None


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message. Times and reward are those of the policy's turn, where they were recorded."""

    role: str
    content: CutText
    reasoning: CutText | None = None
    name: str = ""
    """Of the tool that returned a result."""
    calls: list[ToolCall] = []
    tokens: int | None = None
    started_s: float | None = None
    generate_s: float | None = None
    reward: float | None = None


def prompt_messages(row: Row, budget: TextBudget) -> list[Message]:
    """Return the messages before the policy's first turn; the prompt's text where the data holds no messages."""
    messages = sample_schema.messages_of(row)
    if not messages:
        return [Message("prompt", budget.cut(row["prompt"] or ""))]
    return [_message(message, None, None, budget) for message in messages]


def completion_messages(row: Row, budget: TextBudget) -> list[Message]:
    """Return the messages from the policy's first turn on; empty for a sample that was never generated."""
    completion = sample_schema.completion_of(row)
    if not completion:
        text = row.get("response")
        return [] if text is None else [Message("assistant", budget.cut(text), tokens=row.get("response_tokens"))]
    turns = iter(sample_schema.turns_of(row))
    rewards = iter(sample_schema.agent_of(row).turn_rewards)
    messages = []
    for message in completion:
        of_policy = message.get("role") == "assistant"
        turn, reward = (next(turns, None), next(rewards, None)) if of_policy else (None, None)
        messages.append(_message(message, turn, reward, budget))
    return messages


def _message(message: dict[str, Any], turn: TurnRecord | None, reward: float | None, budget: TextBudget) -> Message:
    calls = message.get("tool_calls") or []
    calls = calls if isinstance(calls, list) else [calls]  # of a program, which may have written anything
    records: list[CallRecord | None] = [*turn.calls] if turn else []
    records += [None] * (len(calls) - len(records))
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return Message(
        role=str(message.get("role", "")),
        content=budget.cut(_text(message.get("content"))),
        reasoning=budget.cut(_text(reasoning)) if reasoning else None,
        name=str(message.get("name") or ""),
        calls=[_call(call, record, budget) for call, record in zip(calls, records, strict=False)],
        tokens=turn.tokens if turn else None,
        started_s=turn.started_s if turn else None,
        generate_s=turn.generate_s if turn else None,
        reward=reward,
    )


def _call(call: Any, record: CallRecord | None, budget: TextBudget) -> ToolCall:
    function = call.get("function", call) if isinstance(call, dict) else call
    if not isinstance(function, dict):
        function = {"name": "", "arguments": call}
    return ToolCall(
        tool=str(function.get("name", "")),
        arguments=budget.cut(_text(function.get("arguments"))),
        outcome=record.outcome if record else None,
        started_s=record.started_s if record else None,
        call_s=record.call_s if record else None,
    )


def _text(content: Any) -> str:
    """Return a message's content as text: parts of other kinds than text as JSON."""
    if content is None:
        return ""
    return content if isinstance(content, str) else msgspec.json.encode(content).decode()


class UnreadableFileError(Exception):
    """A file is damaged or does not hold stored samples; the message names it."""


def read_step_samples(run_folder: Path, step: int, incarnation: int, slowest: int | None = None) -> StepSamples:
    """Return every stored sample and group of one step; raise ``FileNotFoundError`` if there are none.

    Args:
        incarnation: that of the trainer that closed it: ``steps.jsonl`` has the surviving one.
        slowest: return only the groups of that many slowest samples.
    """
    path = sample_schema.samples_file(run_folder / sample_schema.FOLDER, step, incarnation)
    with pyarrow.parquet.ParquetFile(path) as file:
        table = file.read(columns=[name for name in file.schema_arrow.names if sample_schema.is_of_record(name)])
    rows = (table if slowest is None else _groups_of_slowest(table, slowest)).to_pylist()
    terminal = [row for row in rows if row["outcome"] is not None]
    return StepSamples([sample_schema.sample_of_row(row) for row in terminal], list(_groups(rows)))


def _groups_of_slowest(table: pyarrow.Table, count: int) -> pyarrow.Table:
    """Return the rows of the groups that hold the slowest samples: records are made of them one by one."""
    wall_s = pyarrow.compute.subtract(table["committed_at"], table["admitted_at"])
    by_wall = pyarrow.compute.sort_indices(wall_s, sort_keys=[("", "descending")])
    groups = pyarrow.compute.unique(table["group"].take(by_wall[:count]))
    return table.filter(pyarrow.compute.is_in(table["group"], groups))


def _groups(rows: Iterable[Row]) -> Iterable[GroupRecord]:
    of_groups: dict[str, list[Row]] = {}
    for row in rows:
        of_groups.setdefault(row["group"], []).append(row)
    return map(sample_schema.group_of_rows, of_groups.values())


_PREVIEW_CHARACTERS = 240
LISTED_COLUMNS = [
    *("step", "group", "index", "split", "data_source", "prompt", "messages_json", "response", "turns_json"),
    *("outcome", "end", "score", "reason", "end_reason", "response_tokens", "version_min", "version_max", "prompt_id"),
]
"""The columns that ``ListedSample`` is made of."""


class ListedSample(msgspec.Struct, frozen=True):
    """A stored sample in a list."""

    step: int
    group: str
    index: int
    split: str
    data_source: str
    outcome: str
    """An outcome; ``none`` for a sample that never ended."""
    score: float | None
    reason: str
    """The reason that there is no score; empty with one."""
    response_tokens: int | None
    turns: int
    """Turns of the policy."""
    version_min: int | None
    version_max: int | None
    prompt_id: str
    """Identifies the text of the prompt over all steps; empty in samples of older versions."""
    prompt: str
    """The end of the prompt's last message."""
    response: str
    """The beginning of the response."""
    open: bool = False
    """Its step has not closed yet: it is not stored, and its texts are not known here."""


class SampleDetail(msgspec.Struct, frozen=True):
    """One stored sample in full."""

    sample: ListedSample
    prompt: list[Message]
    completion: list[Message]
    ground_truth: CutText
    extra_info: CutText
    scorers: dict[str, ScorerRecord]
    audits: dict[str, ScorerRecord]
    """Of the auditors that have scored the group."""
    agent: StoredAgentRewards
    stages_s: dict[str, float]
    """Stage → seconds, in the order of the pipeline."""
    sandbox: SandboxRecord | None
    """Of its machine; null: it had none."""
    admitted: float | None
    """Seconds since the epoch."""
    rollout_worker: str
    reward_worker: str
    finish_reason: str


def listed(row: Row) -> ListedSample:
    """Return the list's line for a row, which has at least ``LISTED_COLUMNS``."""
    scored = row["score"] is not None
    reason = "" if scored else row["reason"] or row["end_reason"] or ""
    return ListedSample(
        step=row["step"],
        group=row["group"],
        index=row["index"],
        split=row["split"] or "",
        data_source=row["data_source"] or "",
        outcome=row["outcome"] or "none",
        score=row["score"],
        reason=reason[:_PREVIEW_CHARACTERS],
        response_tokens=row["response_tokens"],
        turns=max(len(sample_schema.turns_of(row)), int(row["response"] is not None)),
        version_min=row["version_min"],
        version_max=row["version_max"],
        prompt_id=row.get("prompt_id") or "",
        prompt=_question(row)[-_PREVIEW_CHARACTERS:],
        response=(row["response"] or "")[:_PREVIEW_CHARACTERS],
    )


def listed_open(record: SampleRecord) -> ListedSample:
    """Return a sample of a step that has not closed, from its record, which has no texts."""
    scoring, generation = record.scoring, record.generation
    return ListedSample(
        step=record.step,
        group=record.group,
        index=record.index,
        split=record.split,
        data_source=record.data_source,
        outcome=scoring.outcome,
        score=scoring.value,
        reason="" if scoring.is_scored else (scoring.reason or "")[:_PREVIEW_CHARACTERS],
        response_tokens=generation.response_tokens if generation else None,
        turns=max(1, len(generation.turns)) if generation else 0,
        version_min=generation.version_min if generation else None,
        version_max=generation.version_max if generation else None,
        prompt_id="",
        prompt="",
        response="",
        open=True,
    )


def detail(row: Row, characters: int, audits: Mapping[str, ScorerRecord] = MappingProxyType({})) -> SampleDetail:
    """Return one sample from a row with all columns and its audits, each text cut to ``characters``."""
    budget = TextBudget(characters)
    ended = row["outcome"] is not None and row["admitted_at"] is not None
    return SampleDetail(
        sample=listed(row),
        prompt=prompt_messages(row, budget),
        completion=completion_messages(row, budget),
        ground_truth=budget.cut(_plain(row["ground_truth_json"])),
        extra_info=budget.cut(_plain(row["extra_info_json"])),
        scorers=_cut_reasons(sample_schema.scorers_of_row(row), budget),
        audits=_cut_reasons(audits, budget),
        agent=sample_schema.agent_of(row),
        stages_s=stages_of(sample_schema.sample_of_row(row), sample_schema.group_of_rows([row])) if ended else {},
        sandbox=sample_schema.sandbox_of(row),
        admitted=row["admitted_at"],
        rollout_worker=row["rollout_worker"] or "",
        reward_worker=row["reward_worker"] or "",
        finish_reason=row["finish_reason"] or "",
    )


def _cut_reasons(scorers: Mapping[str, ScorerRecord], budget: TextBudget) -> dict[str, ScorerRecord]:
    def cut(record: ScorerRecord) -> ScorerRecord:
        extra = {
            name: budget.cut(value).text if isinstance(value, str) else value for name, value in record.extra.items()
        }
        reason = None if record.reason is None else budget.cut(record.reason).text
        return msgspec.structs.replace(record, reason=reason, extra=extra)

    return {name: cut(record) for name, record in scorers.items()}


def _question(row: Row) -> str:
    """Return the prompt's last message, which tells prompts apart better than the text with its template."""
    messages = sample_schema.messages_of(row)
    content = messages[-1].get("content") if messages else None
    return content if isinstance(content, str) else row["prompt"] or ""


def _plain(json: str | None) -> str:
    """Return a JSON text, and a JSON string without its quotes."""
    value = msgspec.json.decode(json or "null")
    return value if isinstance(value, str) else "" if value is None else json or ""
