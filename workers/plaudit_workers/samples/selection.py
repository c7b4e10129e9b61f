"""Select stored samples of a run: the first that fulfil conditions, or those with the lowest scores."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from plaudit_metrics.sources.samples.query import SampleQuery
from plaudit_metrics.sources.samples.sample_file import SampleFile

Row = Mapping[str, Any]
"""A stored sample by the columns of docs/stored-samples.md."""


def first_samples(files: Sequence[Path], query: SampleQuery, most: int) -> list[Row]:
    """Return the first samples that fulfil the conditions, in the order of the files.

    Raises:
        UnreadableFileError: a file does not hold stored samples.
    """
    chosen: list[Row] = []
    for path in files:
        with SampleFile(path) as file:
            chosen += map(file.read, file.find(query)[: most - len(chosen)].tolist())
        if len(chosen) == most:
            break
    return chosen


def lowest_samples(files: Sequence[Path], query: SampleQuery, most: int) -> list[Row]:
    """Return the samples with the lowest scores of all that fulfil the conditions, the lowest first.

    Raises:
        UnreadableFileError: a file does not hold stored samples.
    """
    least = -math.inf if query.lowest is None else query.lowest  # leaves out samples without a score
    query = replace(query, lowest=least, order="lowest")
    lowest: list[tuple[float, int, int]] = []
    for number, path in enumerate(files):
        with SampleFile(path, ["score"]) as file:
            found = [(file.read(row)["score"], number, row) for row in file.find(query)[:most].tolist()]
        lowest = heapq.nsmallest(most, [*lowest, *found])
    return [_row(files[number], row) for _, number, row in lowest]


def _row(path: Path, row: int) -> Row:
    with SampleFile(path) as file:
        return file.read(row)


def scorer_values(row: Row) -> dict[str, str]:
    """Return, by scorer, its value, or its outcome and reason: ``{"mine": "data_error: KeyError 'answer'"}``."""
    names = [column.split("/")[1] for column in row if column.startswith("scorer/") and column.endswith("/outcome")]
    return {name: _value(row, name) for name in names if row[f"scorer/{name}/outcome"] is not None}


def _value(row: Row, scorer: str) -> str:
    value, outcome = row[f"scorer/{scorer}/value"], row[f"scorer/{scorer}/outcome"]
    reason = row.get(f"scorer/{scorer}/reason")
    prefix = f"scorer/{scorer}/extra/"
    extras = [
        f"{column.removeprefix(prefix)} {extra:g}"
        if isinstance(extra, float)
        else f"{column.removeprefix(prefix)} {extra}"
        for column, extra in row.items()
        if column.startswith(prefix) and extra is not None
    ]
    result = str(outcome) if value is None else f"{value:g}"
    return ", ".join([f"{result}: {reason}" if reason else result, *extras])
