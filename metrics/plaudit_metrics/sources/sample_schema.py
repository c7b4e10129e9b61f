"""Define the files of stored samples: their names, their columns, and what each column holds, in both directions.

``samples/step-000012-i1.parquet`` has the samples of step 12 as incarnation 1 of the trainer closed it, one row each.
The trainer writes them (``stored_samples``); the metrics service, ``plaudit samples`` and ``plaudit rescore``
read them. docs/stored-samples.md describes the columns to users.

Fields without a fixed shape are JSON (``…_json``). Points in time (``…_at``) are seconds since the epoch, durations
(``…_s``) seconds. A scorer's result is in ``scorer/<name>/<field>``; its further results (verl's ``acc``, a judge's
answer and tokens) are in ``scorer/<name>/extra/<extra>``: numbers as numbers, all else as text.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow

from plaudit_wire.messages import Prompt, SampleBody
from plaudit_wire.records import (
    AgentReward,
    GenerationRecord,
    GroupRecord,
    Sample,
    SampleRecord,
    SandboxRecord,
    ScorerRecord,
    ScoringRecord,
    Stamps,
    TurnRecord,
)

FOLDER = "samples"
"""Folder of the files, in the run's folder."""
_NAME = re.compile(r"step-(\d+)-i(\d+)\.parquet")


def samples_file(folder: Path, step: int, incarnation: int) -> Path:
    """Return the path of a step's file in a folder of samples."""
    return folder / f"step-{step:06d}-i{incarnation}.parquet"


def surviving_files(folder: Path) -> dict[int, Path]:
    """Return the file of each step in a run's samples folder, by step in rising order; empty without files.

    A trainer that resumed from step 10 trains step 11 again: its file of step 11 replaces all older files from step 11
    on, since those steps were rolled back.
    """
    found = [
        (int(name[2]), int(name[1]), path) for path in folder.glob("step-*") if (name := _NAME.fullmatch(path.name))
    ]
    surviving: dict[int, Path] = {}
    for _, of_incarnation in itertools.groupby(sorted(found, reverse=True), lambda each: each[0]):
        began = min(surviving, default=math.inf)
        surviving |= {step: path for _, step, path in of_incarnation if step < began}
    return dict(sorted(surviving.items()))


Row = Mapping[str, Any]
TEXT, WHOLE, REAL = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
_STAMPS = {name: f"{name}_at" for name in Stamps.__struct_fields__}
_GROUP_TIMES = {name: f"group_{name}_at" for name in ("terminal", "ready", "taken", "closed")}
COLUMNS: dict[str, pyarrow.DataType] = {
    "step": WHOLE,
    "incarnation": WHOLE,
    "group": TEXT,
    "index": WHOLE,
    "split": TEXT,
    "position": WHOLE,
    "attempt": WHOLE,
    "admitted_for_step": WHOLE,
    "data_source": TEXT,
    "prompt": TEXT,
    "prompt_id": TEXT,
    "messages_json": TEXT,
    "images": pyarrow.list_(TEXT),
    "max_tokens": WHOLE,
    "response": TEXT,
    "completion_json": TEXT,
    "turns_json": TEXT,
    "agent_json": TEXT,
    "sandbox_json": TEXT,
    "ground_truth_json": TEXT,
    "extra_info_json": TEXT,
    "end": TEXT,
    "end_reason": TEXT,
    "outcome": TEXT,
    "score": REAL,
    "reason": TEXT,
    "prompt_tokens": WHOLE,
    "response_tokens": WHOLE,
    "finish_reason": TEXT,
    "version_min": WHOLE,
    "version_max": WHOLE,
    "version_spans_json": TEXT,
    "generate_s": REAL,
    "tool_s": REAL,
    "engine_queue_s": REAL,
    "num_preempted": WHOLE,
    "rollout_worker": TEXT,
    "reward_worker": TEXT,
    "limiter_s": REAL,
    "retry_s": REAL,
    "call_s": REAL,
    "deliveries": WHOLE,
    **dict.fromkeys((*_STAMPS.values(), *_GROUP_TIMES.values()), REAL),
}
SCORER_COLUMNS: dict[str, pyarrow.DataType] = {
    "value": REAL,
    "outcome": TEXT,
    "reason": TEXT,
    "call_s": REAL,
    "limiter_s": REAL,
    "retry_s": REAL,
    "wait_s": REAL,
    "attempts": WHOLE,
}
ROW_GROUP = 256
"""Rows of a row group: few, so that single samples are read cheaply."""
BOUNDED = ["step", "outcome", "score", "data_source", "split"]
"""Columns whose bounds the footer holds. Those of texts would make it several times as large."""
MOST_EXTRAS = 64
"""Extras of one scorer that get a column each; further ones are not stored."""
_PROMPT = {name: name for name in ("group", "split", "position", "attempt", "data_source", "prompt", "images")} | {
    "step": "admitted_for_step"
}
_GENERATION = {
    name: name
    for name in (
        *("prompt_tokens", "response_tokens", "finish_reason", "version_min", "version_max"),
        *("generate_s", "tool_s", "engine_queue_s", "num_preempted"),
    )
} | {"worker": "rollout_worker"}
_SCORING = {name: name for name in ("outcome", "reason", "limiter_s", "retry_s", "call_s")} | {
    "value": "score",
    "worker": "reward_worker",
}


_OF_RECORD = {
    *("step", "group", "index", "split", "data_source", "deliveries", "end", "end_reason", "sandbox_json"),
    *(*_STAMPS.values(), *_GROUP_TIMES.values(), *_GENERATION.values(), *_SCORING.values()),
}


def is_of_record(column: str) -> bool:
    """Return True for the columns of which records are made: all but texts, which are most of a file."""
    return column in _OF_RECORD or column.startswith("scorer/")


def scorer_column(scorer: str, field: str) -> str:
    """Return the column of one field of a scorer's result."""
    return f"scorer/{scorer}/{field}"


def samples_table(rows: Sequence[dict[str, Any]], scorings: Iterable[ScoringRecord]) -> pyarrow.Table:
    """Return the table of rows, with the columns of the scorers that scored them."""
    scorers: dict[str, dict[str, bool]] = {}
    for name, scorer in ((name, scorer) for scoring in scorings for name, scorer in scoring.scorers.items()):
        numeric = scorers.setdefault(name, {})
        for extra, value in scorer.extra.items():
            if extra in numeric or len(numeric) < MOST_EXTRAS:
                numeric[extra] = numeric.get(extra, True) and not isinstance(value, str)
    fixed = {scorer_column(name, field): kind for name in sorted(scorers) for field, kind in SCORER_COLUMNS.items()}
    extras = {
        scorer_column(name, f"extra/{extra}"): REAL if is_number else TEXT
        for name, numeric in sorted(scorers.items())
        for extra, is_number in sorted(numeric.items())
    }
    for row, (column, kind) in itertools.product(rows, extras.items()):
        if kind == TEXT and isinstance(row.get(column), int | float):
            row[column] = _json(row[column])
    return pyarrow.Table.from_pylist(rows, schema=pyarrow.schema(COLUMNS | fixed | extras))


def group_columns(prompt: Prompt, record: GroupRecord) -> dict[str, Any]:
    """Return the columns that the samples of a group share, except for the step that closed it."""
    return {
        **_columns(prompt, _PROMPT),
        **_columns(record, _GROUP_TIMES),
        "prompt_id": _prompt_id(prompt),
        "messages_json": _json(prompt.messages),
        "max_tokens": prompt.sampling.max_tokens,
        "ground_truth_json": _json(prompt.ground_truth),
        "extra_info_json": _json(prompt.extra_info),
        "end": record.end,
        "end_reason": record.reason,
    }


def sample_columns(stamps: Stamps, body: SampleBody | None, scoring: ScoringRecord | None) -> dict[str, Any]:
    """Return the columns of one sample; without those of its texts or its scoring where it has none."""
    columns = _columns(stamps, _STAMPS)
    if body is not None:
        # The prompt of the sample, which an environment's reset may have changed; prompt_id is that of the data row.
        columns |= {"prompt": body.sample.prompt, "messages_json": _json(body.sample.messages)}
        columns |= {"response": body.sample.response, "version_spans_json": _json(body.version_spans)}
        columns |= _columns(body.generation, _GENERATION) | _conversation_columns(body)
    if scoring is not None:
        columns |= _columns(scoring, _SCORING)
        for name, scorer in scoring.scorers.items():
            columns |= {scorer_column(name, field): getattr(scorer, field) for field in SCORER_COLUMNS}
            columns |= {scorer_column(name, f"extra/{extra}"): value for extra, value in scorer.extra.items()}
    return columns


def _columns(record: msgspec.Struct, columns: Mapping[str, str]) -> dict[str, Any]:
    return {column: getattr(record, field) for field, column in columns.items()}


def _prompt_id(prompt: Prompt) -> str:
    """Return what is the same for the same text and images in every step."""
    content = "\0".join([prompt.prompt, *prompt.images]).encode(errors="replace")
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _conversation_columns(body: SampleBody) -> dict[str, Any]:
    """Return the columns of a conversation; null for a single response."""
    sample, turns = body.sample, body.generation.turns
    rewards = {name: getattr(sample, name) for name in StoredAgentRewards.__struct_fields__}
    rewards |= {"num_branches": len(body.branches), "replaced_parameters": body.generation.replaced_parameters}
    given = {name: value for name, value in rewards.items() if value}
    return {
        "completion_json": _json(sample.completion) if sample.completion else None,
        "turns_json": _json(turns) if turns else None,
        "agent_json": _json(given) if given else None,
        "sandbox_json": _json(body.generation.sandbox) if body.generation.sandbox else None,
    }


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


class StoredAgentRewards(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of ``agent_json``: the rewards of tools and environment, or the reason that there are none."""

    tool_rewards: list[float] = []
    turn_rewards: list[float] = []
    agent_reward: AgentReward | None = None
    environment: dict[str, Any] | None = None
    failure: AgentReward | None = None


def agent_of(row: Row) -> StoredAgentRewards:
    """Return the rewards of a sample's tools and environment."""
    return msgspec.json.decode(row.get("agent_json") or "{}", type=StoredAgentRewards)


def sandbox_of(row: Row) -> SandboxRecord | None:
    """Return the times of a sample's machine; None for a sample without."""
    written = row.get("sandbox_json")
    return msgspec.json.decode(written, type=SandboxRecord) if written else None


def messages_of(row: Row) -> list[dict[str, Any]]:
    """Return the messages of a sample's prompt; none where the data holds no messages."""
    return _list(row, "messages_json")


def completion_of(row: Row) -> list[dict[str, Any]]:
    """Return the messages after the prompt; none for a single response."""
    return _list(row, "completion_json")


def turns_of(row: Row) -> list[TurnRecord]:
    """Return the turns of a conversation; none for a single response."""
    return msgspec.json.decode(row.get("turns_json") or "[]", type=list[TurnRecord])


def _list(row: Row, column: str) -> list[dict[str, Any]]:
    return msgspec.json.decode(row.get(column) or "[]", type=list[dict[str, Any]])


SCORER_INPUT = [
    *("step", "group", "index", "split", "data_source", "prompt", "response", "ground_truth_json", "extra_info_json"),
    *("response_tokens", "finish_reason", "outcome", "score"),
]
"""The columns that ``scorer_input`` needs, and the sample's step and score."""
LATER_SCORER_INPUT = ["messages_json", "max_tokens", "completion_json", "agent_json"]
"""Further ones, which samples of older runs lack."""


def scorer_input(row: Row) -> Sample:
    """Return a sample that was generated as scorers get it, to score it again."""
    return Sample(
        group=row["group"],
        index=row["index"],
        data_source=row["data_source"],
        prompt=row["prompt"],
        response=row["response"],
        ground_truth=msgspec.json.decode(row["ground_truth_json"]),
        extra_info=msgspec.json.decode(row["extra_info_json"]),
        messages=messages_of(row),
        response_tokens=row["response_tokens"] or 0,
        max_tokens=row.get("max_tokens") or 0,
        finish_reason=row["finish_reason"] or "stop",
        split=row["split"],
        completion=completion_of(row),
        **msgspec.structs.asdict(agent_of(row)),
    )


def sample_of_row(row: Row) -> SampleRecord:
    """Return the record of a sample that ended."""
    generated = row["generate_s"] is not None
    return SampleRecord(
        group=row["group"],
        index=row["index"],
        split=row["split"],
        step=row["step"],
        data_source=row["data_source"],
        stamps=Stamps(**_fields(row, _STAMPS)),
        scoring=ScoringRecord(**_fields(row, _SCORING), scorers=scorers_of_row(row)),
        generation=GenerationRecord(**_fields(row, _GENERATION), sandbox=sandbox_of(row)) if generated else None,
        deliveries=row["deliveries"],
    )


def group_of_rows(rows: Sequence[Row]) -> GroupRecord:
    """Return the record of the group to which the rows belong."""
    first = rows[0]
    return GroupRecord(
        group=first["group"],
        split=first["split"],
        step=first["step"],
        end=first["end"],
        num_samples=len(rows),
        num_scored=sum(row["outcome"] == "scored" for row in rows),
        admitted=first["admitted_at"],
        **{field: first[column] for field, column in _GROUP_TIMES.items()},
        reason=first["end_reason"] or "",
    )


def scorers_of_row(row: Row) -> dict[str, ScorerRecord]:
    """Return the result of each scorer; one that was not asked has none."""
    scorers: dict[str, dict[str, Any]] = {}
    for column, value in row.items():
        kind, _, rest = column.partition("/")
        name, _, field = rest.partition("/")
        if kind != "scorer" or value is None:
            continue
        result = scorers.setdefault(name, {})
        if field.startswith("extra/"):
            result.setdefault("extra", {})[field.removeprefix("extra/")] = value
        else:
            result[field] = value
    return {name: msgspec.convert(result, ScorerRecord) for name, result in scorers.items()}


def _fields(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    """Return field → value, for columns that the file has and the row fills."""
    return {field: row[column] for field, column in columns.items() if row.get(column) is not None}
