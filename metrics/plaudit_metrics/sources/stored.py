"""Read a run's stored samples (``samples/step-000012-i1.parquet``, written by the trainer) as records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet

from plaudit_metrics.sources.samples.files import samples_file
from plaudit_metrics.sources.step_samples import StepSamples
from plaudit_wire.records import GenerationRecord, GroupRecord, SampleRecord, ScorerRecord, ScoringRecord, Stamps

Row = Mapping[str, Any]

_EXTRA = "extra/"

_GENERATION = {name: name for name in GenerationRecord.__struct_fields__} | {"worker": "rollout_worker"}
_SCORING = {name: name for name in ("outcome", "reason", "limiter_s", "retry_s", "call_s")} | {
    "value": "score",
    "worker": "reward_worker",
}
_STAMPS = {name: f"{name}_at" for name in Stamps.__struct_fields__}


def read_step_samples(run_folder: Path, step: int, incarnation: int) -> StepSamples:
    """Return every stored sample and group of one step.

    Args:
        run_folder: ``runs/<run>``.
        incarnation: of the trainer that closed it (``steps.jsonl`` has the surviving one).

    Raises:
        FileNotFoundError: the run did not store its samples, or the step was never closed.
    """
    rows = pyarrow.parquet.read_table(samples_file(run_folder, step, incarnation)).to_pylist()
    terminal = [row for row in rows if row["outcome"] is not None]
    return StepSamples([sample_of_row(row) for row in terminal], list(_groups(rows)))


def sample_of_row(row: Row) -> SampleRecord:
    """Return the record of a sample that ended."""
    generated = row["generate_s"] is not None
    return SampleRecord(
        group=row["group"],
        index=row["index"],
        split=row["split"],
        step=row["step"],
        data_source=row["data_source"],
        stamps=Stamps(**_named(row, _STAMPS)),
        scoring=ScoringRecord(**_named(row, _SCORING), scorers=scorers_of_row(row)),
        generation=GenerationRecord(**_named(row, _GENERATION)) if generated else None,
        deliveries=row["deliveries"],
    )


def _groups(rows: Iterable[Row]) -> Iterable[GroupRecord]:
    of_groups: dict[str, list[Row]] = {}
    for row in rows:
        of_groups.setdefault(row["group"], []).append(row)
    return map(group_of_rows, of_groups.values())


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
        closed=first["group_closed_at"],
        terminal=first["group_terminal_at"],
        ready=first["group_ready_at"],
        taken=first["group_taken_at"],
        reason=first["end_reason"] or "",
    )


def scorers_of_row(row: Row) -> dict[str, ScorerRecord]:
    """Return the result of each scorer from the columns ``scorer/<name>/<field>`` and ``scorer/<name>/extra/<extra>``.

    A scorer that was not asked has none.
    """
    fields: dict[str, dict[str, Any]] = {}
    for column, value in row.items():
        kind, _, rest = column.partition("/")
        name, _, field = rest.partition("/")
        if kind != "scorer" or value is None:
            continue
        of_scorer = fields.setdefault(name, {})
        if field.startswith(_EXTRA):
            of_scorer.setdefault("extra", {})[field.removeprefix(_EXTRA)] = value
        else:
            of_scorer[field] = value
    return {name: msgspec.convert(of_scorer, ScorerRecord) for name, of_scorer in fields.items()}


def _named(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    """Return field → value, for columns that the file has and the row fills."""
    return {field: row[column] for field, column in columns.items() if row.get(column) is not None}
