"""Stored samples as the API returns them: a line of a list, and one sample in full."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from plaudit_metrics.sources.samples.conversation import (
    Message,
    StoredAgentRewards,
    agent_of,
    completion_messages,
    prompt_messages,
)
from plaudit_metrics.sources.samples.texts import CutText, TextBudget
from plaudit_metrics.sources.stored import group_of_rows, sample_of_row, scorers_of_row
from plaudit_metrics.statistics.stages import stages_of
from plaudit_wire.records import SampleRecord, ScorerRecord

Row = Mapping[str, Any]

_PREVIEW_CHARACTERS = 240
LISTED_COLUMNS = [
    "step",
    "group",
    "index",
    "split",
    "data_source",
    "prompt",
    "messages_json",
    "response",
    "turns_json",
    "outcome",
    "end",
    "score",
    "reason",
    "end_reason",
    "response_tokens",
    "version_min",
    "version_max",
    "prompt_id",
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
    agent: StoredAgentRewards
    stages_s: dict[str, float]
    """Stage → seconds, in the order of the pipeline."""
    admitted: float | None
    """Seconds since the epoch."""
    rollout_worker: str
    reward_worker: str
    finish_reason: str


def listed(row: Row) -> ListedSample:
    """Return the list's line for a row, which has at least ``LISTED_COLUMNS``."""
    scored = row["score"] is not None
    reason = "" if scored else row["reason"] or row["end_reason"] or ""
    turns = msgspec.json.decode(row.get("turns_json") or "[]")
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
        turns=max(len(turns), int(row["response"] is not None)),
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


def detail(row: Row, characters: int) -> SampleDetail:
    """Return one sample from a row with all columns, each text cut to ``characters``."""
    budget = TextBudget(characters)
    ended = row["outcome"] is not None and row["admitted_at"] is not None
    return SampleDetail(
        sample=listed(row),
        prompt=prompt_messages(row, budget),
        completion=completion_messages(row, budget),
        ground_truth=budget.cut(_plain(row["ground_truth_json"])),
        extra_info=budget.cut(_plain(row["extra_info_json"])),
        scorers=_cut_reasons(scorers_of_row(row), budget),
        agent=agent_of(row),
        stages_s=stages_of(sample_of_row(row), group_of_rows([row])) if ended else {},
        admitted=row["admitted_at"],
        rollout_worker=row["rollout_worker"] or "",
        reward_worker=row["reward_worker"] or "",
        finish_reason=row["finish_reason"] or "",
    )


def _cut_reasons(scorers: dict[str, ScorerRecord], budget: TextBudget) -> dict[str, ScorerRecord]:
    def cut(record: ScorerRecord) -> ScorerRecord:
        extra = {
            name: budget.cut(value).text if isinstance(value, str) else value for name, value in record.extra.items()
        }
        reason = None if record.reason is None else budget.cut(record.reason).text
        return msgspec.structs.replace(record, reason=reason, extra=extra)

    return {name: cut(record) for name, record in scorers.items()}


def _question(row: Row) -> str:
    """Return the prompt's last message, which tells prompts apart better than the text with its template."""
    messages = msgspec.json.decode(row.get("messages_json") or "[]")
    content = messages[-1].get("content") if messages else None
    return content if isinstance(content, str) else row["prompt"] or ""


def _plain(json: str | None) -> str:
    """Return a JSON text, and a JSON string without its quotes."""
    value = msgspec.json.decode(json or "null")
    return value if isinstance(value, str) else "" if value is None else json or ""
