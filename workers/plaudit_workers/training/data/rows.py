"""Reads data rows in verl's columns from Parquet or JSONL, and says plainly what is wrong with a file.

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

from plaudit_workers.process import RefusedError

REQUIRED_COLUMNS = ("data_source", "prompt", "reward_model")
OPTIONAL_COLUMNS = ("extra_info",)

_REMEDIES = {
    "data_source": "name where each prompt comes from (text); rule scorers are chosen by it",
    "prompt": "give each prompt as messages ([{role, content}, …]) or as text",
    "reward_model": "give each row {ground_truth: …}; null where scorers need none",
}


class Rows(Protocol):
    """A file's rows, by number."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def __getitem__(self, number: int) -> dict[str, Any]:
        """One row: column name → value."""
        ...

    def column(self, name: str) -> list[Any]:
        """One column of all rows."""
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
        values: list[Any] = self.table.column(name).to_pylist()
        return values


class _Lines(list[dict[str, Any]]):
    """A JSONL file's rows."""

    def column(self, name: str) -> list[Any]:
        return [row[name] for row in self]


def read_rows(path: Path) -> Rows:
    """Opens a data file.

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
        refuse_missing_columns(path, names)
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
            refuse_missing_columns(path, list(rows[-1]), f", line {number}")
    return rows


def refuse_missing_columns(path: Path, names: Sequence[str], place: str = "") -> None:
    """Checks that every required column is there.

    Raises:
        RefusedError: names the file, the first missing column, what there is and what to do.
    """
    for column in REQUIRED_COLUMNS:
        if column not in names:
            found = ", ".join(names) or "none"
            raise RefusedError(
                f"data file {path}{place}: column {column!r} is missing (found: {found}); {_REMEDIES[column]}"
            )


def _refuse_rows(path: Path, rows: Rows) -> None:
    """Looks at every row before the run begins, rather than when its turn comes."""
    for column, is_right in (("prompt", _is_prompt), ("reward_model", _has_ground_truth)):
        for number, value in enumerate(rows.column(column), start=1):
            if not is_right(value):
                raise RefusedError(
                    f"data file {path}, row {number}: column {column!r} is {value!r}; {_REMEDIES[column]}"
                )


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return True
    is_list = isinstance(value, list) and len(value) > 0
    return is_list and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in value)


def _has_ground_truth(value: Any) -> bool:
    return isinstance(value, dict) and "ground_truth" in value
