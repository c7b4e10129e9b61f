"""Check every row of the data files that a job names, before anything starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from plaudit_workers.images.decoding import ImageError
from plaudit_workers.images.row_check import row_files
from plaudit_workers.job.data_row import (
    CHECKS,
    CHECKS_WITH_IMAGES,
    IMAGES_COLUMN,
    REMEDIES,
    REQUIRED_COLUMNS,
    extra_info_of,
    refused_media,
)
from plaudit_workers.job.problem import Problem
from plaudit_workers.job.spec.data import ImagesSpec

_ROWS_AT_A_TIME = 4096
_ROWS_WITH_IMAGES = 64
_NEEDED = "Rows need data_source, prompt (messages or text) and reward_model: {ground_truth: …}"


class _RowError(Exception):
    """Report a file or a row that is not what the columns promise: the complaint, and the remedy."""

    def __init__(self, complaint: str, remedy: str = _NEEDED) -> None:
        super().__init__(complaint)
        self.remedy = remedy


def data_problem(field: str, path: str, images: ImagesSpec | None = None) -> Problem | None:
    """Return the first problem of a data file, or None."""
    file = Path(path)
    if not os.path.isfile(file):
        message = f"{path} is a folder" if os.path.isdir(file) else f"there is no file {path}"
        return Problem(field, message, "Write the data first, or correct the path: it is relative to the job file")
    if file.suffix not in _READERS:
        return Problem(field, f"{path} ends with {file.suffix!r}", "Give a .parquet or a .jsonl file")
    num_rows = 0
    try:
        columns = (*REQUIRED_COLUMNS, "extra_info", *([IMAGES_COLUMN] if images else []))
        for num_rows, row in enumerate(data_rows(path, columns), 1):  # counted
            _check(num_rows, row, images=images is not None)
            if images:
                _check_images(num_rows, row, file.parent, images)
    except _RowError as error:
        return Problem(field, f"{path} {error}", error.remedy)
    except OSError as error:
        return Problem(field, f"cannot read {path}: {error.strerror or error}", "Write the file again")
    return None if num_rows else Problem(field, f"{path} has no rows", _NEEDED)


def data_sources(path: str) -> set[Any]:
    """Return the data sources of all rows of a file without problems."""
    return {row["data_source"] for row in data_rows(path, ("data_source",))}


def shared_extra_info(path: str) -> set[str]:
    """Return the keys of ``extra_info`` that every row of a file without problems has."""
    shared: set[str] | None = None
    for row in data_rows(path, ("extra_info",)):
        keys = extra_info_of(row.get("extra_info")).keys()
        shared = set(keys) if shared is None else shared & keys
    return shared or set()


def data_rows(path: str, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file without problems; a column that the file does not have is missing in them."""
    return _READERS[Path(path).suffix](Path(path), columns)


def _parquet(file: Path, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            names = opened.schema_arrow.names
            _refuse_columns(names, columns)
            at_a_time = _ROWS_WITH_IMAGES if IMAGES_COLUMN in columns else _ROWS_AT_A_TIME
            for batch in opened.iter_batches(at_a_time, columns=[name for name in columns if name in names]):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise _RowError(f"is not a Parquet file ({error})", "Write the file again") from error


def _jsonl(file: Path, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    decode = msgspec.json.Decoder().decode
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise _RowError(f"is not JSON in line {number}: {error}") from error
            if not isinstance(row, dict):
                raise _RowError(f"has no JSON object in line {number}")
            _refuse_columns(list(row), columns, f" in line {number}")
            yield row


_READERS = {".parquet": _parquet, ".jsonl": _jsonl}


def _refuse_columns(names: list[str], columns: tuple[str, ...], place: str = "") -> None:
    missing = [name for name in REQUIRED_COLUMNS if name in columns and name not in names]
    if missing:
        noun = "column" if len(missing) == 1 else "columns"
        raise _RowError(f"lacks {noun} {', '.join(missing)}{place} (it has {', '.join(names) or 'none'})")
    media = [(name, remedy) for name, remedy in refused_media(IMAGES_COLUMN in columns).items() if name in names]
    if media and "prompt" in columns:
        name, remedy = media[0]
        raise _RowError(f"has column {name}{place}", remedy)


def _check(number: int, row: dict[str, Any], *, images: bool) -> None:
    for column, is_valid in (CHECKS_WITH_IMAGES if images else CHECKS).items():
        value = row.get(column)
        if not is_valid(value):
            shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
            remedy = REMEDIES[column]
            raise _RowError(f"row {number}: column {column} is {shown}", remedy[0].upper() + remedy[1:])


def _check_images(number: int, row: dict[str, Any], folder: Path, images: ImagesSpec) -> None:
    try:
        row_files(row["prompt"], row.get(IMAGES_COLUMN), folder, images.max_per_prompt)
    except ImageError as error:
        raise _RowError(f"row {number}: column {IMAGES_COLUMN} {error.complaint}", error.remedy) from error
