"""Store samples: every closed group of a step as Parquet, one row per sample.

``samples/step-000012-i1.parquet`` is step 12 as incarnation 1 trained it (``sources.samples`` chooses among
incarnations); the last file of a step that was interrupted in its middle has all groups. Columns: group and index of
the sample, its texts, messages and digests of images, the result of each scorer (``scorer/<name>/…``), the times of its
stages, the policy versions that generated it. Fields without a fixed shape are JSON. Further results of a scorer
(verl's ``acc``, a judge's answer and tokens) are in ``scorer/<name>/extra/<extra>``: numbers as numbers, all else as
text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet

from plaudit_wire.logs import get_logger
from plaudit_wire.messages import Prompt, SampleBody
from plaudit_wire.records import GroupRecord, ScoringRecord, Stamps
from plaudit_workers.files import whole_file
from plaudit_workers.stream.groups import Group, GroupSample

logger = get_logger(__name__)

_TEXT, _WHOLE, _REAL = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
_COLUMNS: dict[str, pyarrow.DataType] = {
    "step": _WHOLE,
    "incarnation": _WHOLE,
    "group": _TEXT,
    "index": _WHOLE,
    "split": _TEXT,
    "position": _WHOLE,
    "attempt": _WHOLE,
    "admitted_for_step": _WHOLE,
    "data_source": _TEXT,
    "prompt": _TEXT,
    "prompt_id": _TEXT,
    "messages_json": _TEXT,
    "images": pyarrow.list_(_TEXT),
    "max_tokens": _WHOLE,
    "response": _TEXT,
    "completion_json": _TEXT,
    "turns_json": _TEXT,
    "agent_json": _TEXT,
    "ground_truth_json": _TEXT,
    "extra_info_json": _TEXT,
    "end": _TEXT,
    "end_reason": _TEXT,
    "outcome": _TEXT,
    "score": _REAL,
    "reason": _TEXT,
    "prompt_tokens": _WHOLE,
    "response_tokens": _WHOLE,
    "finish_reason": _TEXT,
    "version_min": _WHOLE,
    "version_max": _WHOLE,
    "version_spans_json": _TEXT,
    "generate_s": _REAL,
    "tool_s": _REAL,
    "engine_queue_s": _REAL,
    "num_preempted": _WHOLE,
    "rollout_worker": _TEXT,
    "reward_worker": _TEXT,
    "limiter_s": _REAL,
    "retry_s": _REAL,
    "call_s": _REAL,
    "deliveries": _WHOLE,
    **{f"{stamp}_at": _REAL for stamp in Stamps.__struct_fields__},
    **{f"group_{stamp}_at": _REAL for stamp in ("terminal", "ready", "taken", "closed")},
}
"""Column → type; points in time (``…_at``) in seconds since the epoch, durations (``…_s``) in seconds."""
_SCORER_COLUMNS: dict[str, pyarrow.DataType] = {
    "value": _REAL,
    "outcome": _TEXT,
    "reason": _TEXT,
    "call_s": _REAL,
    "limiter_s": _REAL,
    "retry_s": _REAL,
    "wait_s": _REAL,
    "attempts": _WHOLE,
}
_ROW_GROUP = 256
_BOUNDED = ["step", "outcome", "score", "data_source", "split"]
"""Columns whose bounds the footer holds. Those of texts would make it several times as large."""
MOST_EXTRAS = 64
"""Extras of one scorer that get a column each (``scorer/<name>/extra/<extra>``); further ones are not stored."""


def store_groups(
    folder: Path,
    step: int,
    incarnation: int,
    groups: Sequence[Group],
    records: Mapping[str, GroupRecord],
    begun_by: int = 0,
) -> Path:
    """Write the closed groups of a step.

    Args:
        groups: their hashes as read before they were closed.
        records: group id → how it ended.
        begun_by: the incarnation that stored the step's first groups, which come first in this file too; 0: none.

    Raises:
        RefusedError: the disk is full.
    """
    rows = [row for group in groups for row in _rows(step, incarnation, group, records[group.id])]
    scorers = sorted({name for group in groups for sample in group.samples for name in _scorers(sample)})
    extras = _extra_columns(groups)
    for row in rows:
        _fit_extras(row, extras)
    schema = pyarrow.schema(
        [
            *_COLUMNS.items(),
            *((f"scorer/{name}/{column}", kind) for name in scorers for column, kind in _SCORER_COLUMNS.items()),
            *extras.items(),
        ]
    )
    table = pyarrow.Table.from_pylist(rows, schema=schema)
    target = _file(folder, step, incarnation)
    write_samples(_after(_file(folder, step, begun_by), table) if begun_by else table, target)
    return target


def _file(folder: Path, step: int, incarnation: int) -> Path:
    return folder / f"step-{step:06d}-i{incarnation}.parquet"


def _after(earlier: Path, table: pyarrow.Table) -> pyarrow.Table:
    """Put the rows of an earlier file before those of a table; a column that is text in one of them is text."""
    if not earlier.exists():  # no group of the step had ended
        return table
    try:
        tables = [pyarrow.parquet.read_table(earlier), table]
    except (OSError, pyarrow.ArrowException) as error:
        logger.warning("the step's first samples are unreadable", path=str(earlier), error=str(error))
        return table
    of_both = set(tables[0].column_names) & set(tables[1].column_names)
    for name in sorted(
        each for each in of_both if tables[0].schema.field(each).type != tables[1].schema.field(each).type
    ):
        tables = [each.set_column(each.column_names.index(name), name, each[name].cast(_TEXT)) for each in tables]
    return pyarrow.concat_tables(tables, promote_options="default")


def write_samples(table: pyarrow.Table, target: Path) -> None:
    """Write stored samples so that single ones are read cheaply: in small row groups, with bounds to skip files by.

    Raises:
        RefusedError: the disk is full.
    """
    with whole_file(target) as temporary:
        pyarrow.parquet.write_table(
            table, temporary, compression="zstd", row_group_size=_ROW_GROUP, write_statistics=_BOUNDED
        )


def _rows(step: int, incarnation: int, group: Group, record: GroupRecord) -> Iterator[dict[str, Any]]:
    prompt = group.prompt
    shared = {
        "step": step,
        "incarnation": incarnation,
        "group": group.id,
        "split": prompt.split,
        "position": prompt.position,
        "attempt": prompt.attempt,
        "admitted_for_step": prompt.step,
        "data_source": prompt.data_source,
        "prompt": prompt.prompt,
        "prompt_id": _prompt_id(prompt),
        "images": prompt.images,
        "messages_json": _json(prompt.messages),
        "max_tokens": prompt.sampling.max_tokens,
        "ground_truth_json": _json(prompt.ground_truth),
        "extra_info_json": _json(prompt.extra_info),
        "end": record.end,
        "end_reason": record.reason,
        "group_terminal_at": record.terminal,
        "group_ready_at": record.ready,
        "group_taken_at": record.taken,
        "group_closed_at": record.closed,
    }
    for sample in group.samples:
        stamps = {f"{name}_at": getattr(sample.stamps, name) for name in Stamps.__struct_fields__}
        own = {"index": sample.index, "deliveries": sample.deliveries}
        yield shared | own | stamps | _body_columns(sample.body) | _scoring_columns(sample.scoring)


def _prompt_id(prompt: Prompt) -> str:
    """Return what is the same for the same text and images in every step."""
    content = "\0".join([prompt.prompt, *prompt.images]).encode(errors="replace")
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _body_columns(body: SampleBody | None) -> dict[str, Any]:
    if body is None:
        return {}
    generation = body.generation
    return {
        "response": body.sample.response,
        **_conversation_columns(body),
        "prompt_tokens": generation.prompt_tokens,
        "response_tokens": generation.response_tokens,
        "finish_reason": generation.finish_reason,
        "version_min": generation.version_min,
        "version_max": generation.version_max,
        "version_spans_json": _json(body.version_spans),
        "generate_s": generation.generate_s,
        "tool_s": generation.tool_s,
        "engine_queue_s": generation.engine_queue_s,
        "num_preempted": generation.num_preempted,
        "rollout_worker": generation.worker,
    }


def _conversation_columns(body: SampleBody) -> dict[str, Any]:
    """Return the columns of a conversation; null for a single response."""
    sample, turns = body.sample, body.generation.turns
    rewards = {
        "tool_rewards": sample.tool_rewards,
        "turn_rewards": sample.turn_rewards,
        "agent_reward": sample.agent_reward,
        "environment": sample.environment,
        "failure": sample.failure,
        "num_branches": len(body.branches),
        "replaced_parameters": body.generation.replaced_parameters,
    }
    given = {name: value for name, value in rewards.items() if value}
    return {
        "completion_json": _json(sample.completion) if sample.completion else None,
        "turns_json": _json(turns) if turns else None,
        "agent_json": _json(given) if given else None,
    }


def _scoring_columns(scoring: ScoringRecord | None) -> dict[str, Any]:
    if scoring is None:
        return {}
    columns: dict[str, Any] = {
        "outcome": scoring.outcome,
        "score": scoring.value,
        "reason": scoring.reason,
        "limiter_s": scoring.limiter_s,
        "retry_s": scoring.retry_s,
        "call_s": scoring.call_s,
        "reward_worker": scoring.worker,
    }
    for name, scorer in scoring.scorers.items():
        columns |= {f"scorer/{name}/{column}": getattr(scorer, column) for column in _SCORER_COLUMNS}
        columns |= {_extra_column(name, extra): value for extra, value in scorer.extra.items()}
    return columns


def _extra_columns(groups: Sequence[Group]) -> dict[str, pyarrow.DataType]:
    """Return a column for each extra of each scorer: of numbers where all its values are, else of text."""
    by_scorer: dict[str, dict[str, bool]] = {}
    scorings = (sample.scoring for group in groups for sample in group.samples if sample.scoring is not None)
    for name, scorer in ((name, scorer) for scoring in scorings for name, scorer in scoring.scorers.items()):
        numeric = by_scorer.setdefault(name, {})
        for extra, value in scorer.extra.items():
            if extra in numeric or len(numeric) < MOST_EXTRAS:
                numeric[extra] = numeric.get(extra, True) and not isinstance(value, str)
    return {
        _extra_column(name, extra): _REAL if is_number else _TEXT
        for name, numeric in sorted(by_scorer.items())
        for extra, is_number in sorted(numeric.items())
    }


def _extra_column(scorer: str, extra: str) -> str:
    return f"scorer/{scorer}/extra/{extra}"


def _fit_extras(row: dict[str, Any], extras: Mapping[str, pyarrow.DataType]) -> None:
    """Write the numbers of text columns as text."""
    for column, kind in extras.items():
        if kind == _TEXT and isinstance(row.get(column), int | float):
            row[column] = _json(row[column])


def _scorers(sample: GroupSample) -> list[str]:
    return [] if sample.scoring is None else list(sample.scoring.scorers)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
