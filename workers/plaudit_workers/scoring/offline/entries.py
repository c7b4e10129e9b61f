"""Read a file of samples: the lines of a text file, or the rows of a Parquet file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from plaudit_wire.errors import RefusedError

RawSample = bytes | Mapping[str, Any]
"""One line, not decoded yet, or one row."""

_PARQUET_MAGIC = b"PAR1"
_ROWS_AT_A_TIME = 1024
_COLUMNS = (
    "response",
    "prompt",
    "data_source",
    "ground_truth",
    "reward_model",
    "extra_info",
    "response_tokens",
    "max_tokens",
    "finish_reason",
    "id",
    "group",
    "index",
)
"""Columns of a Parquet file that are read; others are ignored."""
_GENERATED = "responses"
"""verl's column for the responses of one prompt."""


def file_entries(path: Path, option: str = "") -> Iterator[RawSample]:
    """Yield the lines or rows of a file; Parquet is recognised by its content.

    Raises:
        RefusedError: the file cannot be read, or is Parquet without responses.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(_PARQUET_MAGIC)) != _PARQUET_MAGIC:
                file.seek(0)
                yield from file
                return
        yield from _rows(path)
    except OSError as error:
        raise RefusedError(f"{option} {path} cannot be read: {error.strerror}".strip()) from error


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as opened:
            names = opened.schema_arrow.names
            _refuse_without_responses(path, names)
            columns = [name for name in (*_COLUMNS, _GENERATED) if name in names]
            number = 0
            for batch in opened.iter_batches(_ROWS_AT_A_TIME, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield from _responses(row, f"row-{number}")
    except pyarrow.ArrowException as error:
        raise RefusedError(f"{path} is a damaged Parquet file: {error}") from error


def _responses(row: dict[str, Any], group: str) -> Iterator[Mapping[str, Any]]:
    """Yield one row for each of verl's ``responses``, or the row itself."""
    responses = row.pop(_GENERATED, None)
    if responses is None or "response" in row:
        yield row
        return
    for response in [responses] if isinstance(responses, str) else responses:
        yield {"group": group, **row, "response": response}


def _refuse_without_responses(path: Path, names: list[str]) -> None:
    if "ground_truth_json" in names:
        raise RefusedError(f"{path} has the stored samples of a run. Score them with: plaudit rescore {path} --job …")
    if "response" not in names and _GENERATED not in names:
        raise RefusedError(
            f"{path} has no column response or responses (it has {', '.join(names) or 'none'}). To try scorers on data "
            "without responses, use: plaudit try JOB"
        )
