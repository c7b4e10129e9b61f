"""Read data rows in verl's columns from Parquet or JSONL; report what is wrong with a file.

Called by ``data``. A Parquet table stays in Arrow's memory and a row is made when it is asked for; JSON lines are held
as Python objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pyarrow
import pyarrow.parquet

from plaudit_workers.job.data_row import CHECKS, MEDIA_COLUMNS, MEDIA_REMEDY, REMEDIES, REQUIRED_COLUMNS
from plaudit_workers.process import RefusedError

OPTIONAL_COLUMNS = ("extra_info",)


class Rows(Protocol):
    """A file's rows, by index."""

    def __len__(self) -> int:
        """Return their number."""
        ...

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return one row: column name → value."""
        ...

    def column(self, name: str) -> list[Any]:
        """Return one column of all rows; without such a column nothing, or a null for each row."""
        ...


@dataclass(frozen=True)
class _Table:
    """A Parquet file's rows."""

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
    """A JSONL file's rows."""

    def column(self, name: str) -> list[Any]:
        return [row.get(name) for row in self]


def read_rows(path: Path) -> Rows:
    """Open a data file.

    Raises:
        RefusedError: it is missing, of another kind, damaged, empty, a column is missing, or a row is not what its
            column promises.
    """
    readers = {".parquet": _read_parquet, ".jsonl": _read_jsonl}
    if path.suffix not in readers:
        raise RefusedError(f"data file {path}: the name must end in .parquet or .jsonl")
    if not path.is_file():
        raise RefusedError(f"data file {path} does not exist; name an existing file under spec.data")
    rows = readers[path.suffix](path)
    if len(rows) == 0:
        raise RefusedError(f"data file {path} holds no rows; at least one prompt is needed")
    _refuse_rows(path, rows)
    return rows


def _read_parquet(path: Path) -> Rows:
    try:
        names = pyarrow.parquet.read_schema(path).names
        refuse_columns(path, names)
        wanted = [name for name in (*REQUIRED_COLUMNS, *OPTIONAL_COLUMNS) if name in names]
        return _Table(pyarrow.parquet.read_table(path, columns=wanted))
    except (pyarrow.ArrowException, OSError) as error:
        raise RefusedError(f"data file {path} cannot be read as Parquet: {error}") from error


def _read_jsonl(path: Path) -> Rows:
    rows = _Lines()
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                rows.append(msgspec.json.decode(line, type=dict[str, Any]))
            except msgspec.DecodeError as error:
                raise RefusedError(f"data file {path}, line {number}: not a JSON object: {error}") from error
            refuse_columns(path, list(rows[-1]), f", line {number}")
    return rows


def refuse_columns(path: Path, names: Sequence[str], place: str = "") -> None:
    """Check that no required column is missing, and that none holds images, video or audio.

    Raises:
        RefusedError: names the file, the first such column, what there is and what to do.
    """
    for column in REQUIRED_COLUMNS:
        if column not in names:
            found = ", ".join(names) or "none"
            raise RefusedError(
                f"data file {path}{place}: column {column!r} is missing (found: {found}); {REMEDIES[column]}"
            )
    for column in MEDIA_COLUMNS:
        if column in names:
            raise RefusedError(f"data file {path}{place}: has column {column!r}. {MEDIA_REMEDY}")


def _refuse_rows(path: Path, rows: Rows) -> None:
    """Check every row before the run starts."""
    for column, is_valid in CHECKS.items():
        for number, value in enumerate(rows.column(column), start=1):
            if not is_valid(value):
                raise RefusedError(
                    f"data file {path}, row {number}: column {column!r} is {value!r}; {REMEDIES[column]}"
                )
