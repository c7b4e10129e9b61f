"""Select stored samples of a run: those without a score, those with the lowest scores, or all of a step."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pyarrow
import pyarrow.parquet

from plaudit_workers.process import RefusedError

Row = Mapping[str, Any]
"""A stored sample by the columns of docs/stored-samples.md."""
Which = Literal["all", "failed", "lowest"]

_ROWS_AT_A_TIME = 256


def read_rows(files: Iterable[Path]) -> Iterator[Row]:
    """Yield the stored samples of each file, oldest step first.

    Raises:
        RefusedError: a file does not hold stored samples.
    """
    for file in files:
        try:
            with pyarrow.parquet.ParquetFile(file) as opened:
                for batch in opened.iter_batches(_ROWS_AT_A_TIME):
                    yield from batch.to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise RefusedError(f"{file} cannot be read: {error}. Give a run's id, or its samples folder") from error


def select(rows: Iterable[Row], which: Which, most: int) -> list[Row]:
    """Return at most ``most`` samples.

    Args:
        rows: stored samples.
        which: ``failed``: the first of those without a score; ``lowest``: those with the lowest scores, lowest first;
            ``all``: the first.
        most: how many.
    """
    if which == "lowest":
        scored = (row for row in rows if row["score"] is not None)
        return heapq.nsmallest(most, scored, key=lambda row: (row["score"], row["step"]))
    return list(islice((row for row in rows if which == "all" or row["score"] is None), most))


def scorer_values(row: Row) -> dict[str, str]:
    """Return, by scorer, its value, or its outcome and reason: ``{"mine": "data_error: KeyError 'answer'"}``."""
    names = [column.split("/")[1] for column in row if column.startswith("scorer/") and column.endswith("/outcome")]
    return {name: _value(row, name) for name in names if row[f"scorer/{name}/outcome"] is not None}


def _value(row: Row, scorer: str) -> str:
    value, outcome = row[f"scorer/{scorer}/value"], row[f"scorer/{scorer}/outcome"]
    if value is not None:
        return f"{value:g}"
    reason = row.get(f"scorer/{scorer}/reason")
    return f"{outcome}: {reason}" if reason else str(outcome)
