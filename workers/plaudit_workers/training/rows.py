"""Read data rows in verl's columns from Parquet or JSONL, and report what is wrong with a file.

A Parquet table stays in Arrow's memory and a row is made when it is asked for; JSON lines are held as Python objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pyarrow
import pyarrow.parquet

from plaudit_job.data_row import (
    CHECKS,
    CHECKS_WITH_IMAGES,
    IMAGES_COLUMN,
    REMEDIES,
    REQUIRED_COLUMNS,
    extra_info_of,
    refused_media,
)
from plaudit_job.spec.rollout import PassRateSpec
from plaudit_wire.errors import RefusedError

_IMAGES_AT_A_TIME = 64


class Rows(Protocol):
    """Hold a file's rows, by index."""

    def __len__(self) -> int:
        """Return their number."""

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return one row: column name → value."""

    def column(self, name: str) -> list[Any]:
        """Return one column of all rows; without such a column nothing, or a null for each row."""


@dataclass(frozen=True)
class _Table:
    """Hold a Parquet file's rows."""

    table: pyarrow.Table

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row: dict[str, Any] = self.table.slice(number, 1).to_pylist()[0]
        return row

    def column(self, name: str) -> list[Any]:
        if name not in self.table.column_names:
            return []
        values: list[Any] = self.table.column(name).to_pylist()
        return values


class _Lines(list[dict[str, Any]]):
    """Hold a JSONL file's rows."""

    def column(self, name: str) -> list[Any]:
        return [row.get(name) for row in self]


def read_rows(path: Path, *, images: bool = False) -> Rows:
    """Open a data file and check every row.

    Args:
        images: the job reads images. They are no part of the rows: see ``image_column``.
    """
    readers = {".parquet": _read_parquet, ".jsonl": _read_jsonl}
    if path.suffix not in readers:
        raise RefusedError(f"data file {path}: the name must end in .parquet or .jsonl")
    if not path.is_file():
        raise RefusedError(f"data file {path} does not exist; name an existing file under spec.data")
    rows = readers[path.suffix](path, images)
    if len(rows) == 0:
        raise RefusedError(f"data file {path} holds no rows; at least one prompt is needed")
    for column, is_valid in (CHECKS_WITH_IMAGES if images else CHECKS).items():
        for number, value in enumerate(rows.column(column), start=1):
            if not is_valid(value):
                raise RefusedError(
                    f"data file {path}, row {number}: column {column!r} is {value!r}; {REMEDIES[column]}"
                )
    return rows


def image_column(path: Path, rows: Rows) -> Iterator[Any]:
    """Yield the column ``images`` of each row, null without it, and hold few of a Parquet file's at a time."""
    if path.suffix != ".parquet":
        yield from rows.column(IMAGES_COLUMN)
        return
    with pyarrow.parquet.ParquetFile(path) as file:
        if IMAGES_COLUMN not in file.schema_arrow.names:
            yield from [None] * len(rows)
            return
        for batch in file.iter_batches(_IMAGES_AT_A_TIME, columns=[IMAGES_COLUMN]):
            yield from batch.column(0).to_pylist()


def _read_parquet(path: Path, images: bool) -> Rows:
    try:
        names = pyarrow.parquet.read_schema(path).names
        refuse_columns(path, names, images=images)
        wanted = [name for name in (*REQUIRED_COLUMNS, "extra_info") if name in names]
        return _Table(pyarrow.parquet.read_table(path, columns=wanted))
    except (pyarrow.ArrowException, OSError) as error:
        raise RefusedError(f"data file {path} cannot be read as Parquet: {error}") from error


def _read_jsonl(path: Path, images: bool) -> Rows:
    rows = _Lines()
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                rows.append(msgspec.json.decode(line, type=dict[str, Any]))
            except msgspec.DecodeError as error:
                raise RefusedError(f"data file {path}, line {number}: not a JSON object: {error}") from error
            refuse_columns(path, list(rows[-1]), f", line {number}", images=images)
    return rows


def refuse_columns(path: Path, names: Sequence[str], place: str = "", *, images: bool = False) -> None:
    """Check that no required column is missing, and that none holds video, audio, or images that are not read."""
    for column in REQUIRED_COLUMNS:
        if column not in names:
            found = ", ".join(names) or "none"
            raise RefusedError(
                f"data file {path}{place}: column {column!r} is missing (found: {found}); {REMEDIES[column]}"
            )
    for column, remedy in refused_media(images).items():
        if column in names:
            raise RefusedError(f"data file {path}{place}: has column {column!r}. {remedy}")


def within_pass_rate(path: Path, rows: Rows, section: PassRateSpec) -> list[bool]:
    """Return for each row whether its pass rate is within the bounds, which count as within (``data.train.passRate``).

    The choice depends on the file and the job alone, so a resumed run has the same prompts at the same positions.
    """
    return [section.min <= _pass_rate(path, number, rows, section.field) <= section.max for number in range(len(rows))]


def _pass_rate(path: Path, number: int, rows: Rows, field: str) -> float:
    value = extra_info_of(rows[number].get("extra_info")).get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise RefusedError(
            f"data file {path}, row {number + 1}: extra_info[{field!r}] is {value!r}; data.train.passRate requires a "
            "number from 0 to 1 in every row. Write it, name another field, or remove passRate"
        )
    return float(value)
