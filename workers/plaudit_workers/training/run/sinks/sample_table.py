"""Build the table of samples that goes to W&B and MLflow with a step: a few of its stored samples."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from plaudit_metrics.sources.samples.few import few_samples
from plaudit_metrics.sources.samples.files import UnreadableFileError
from plaudit_wire.logs import get_logger

logger = get_logger(__name__)

Cell = str | int | float | None

_COLUMNS = ("step", "group", "index", "data_source", "prompt", "response", "ground_truth_json", "outcome", "score")
_LAST = ("reason", "response_tokens")
_CHARACTERS = 4000
"""Of each text."""


class SampleTable(NamedTuple):
    """Hold a few samples of a step."""

    columns: list[str]
    rows: list[list[Cell]]


def sample_table(samples: Path | None) -> SampleTable | None:
    """Return the table of a step's stored samples, with a column for the value of each scorer.

    Return None without stored samples, or if they cannot be read, which is logged.
    """
    if samples is None:
        return None
    try:
        rows = few_samples(samples)
    except UnreadableFileError as error:
        logger.warning("no table of samples", error=str(error))
        return None
    if not rows:
        return None
    values = [column for column in rows[0] if column.startswith("scorer/") and column.endswith("/value")]
    columns = [*_COLUMNS, *values, *_LAST]
    return SampleTable(columns, [[_cell(row.get(column)) for column in columns] for row in rows])


def _cell(value: Cell) -> Cell:
    return value[:_CHARACTERS] if isinstance(value, str) else value
