"""Read the rows of data files one by one: Parquet, JSON lines and folders of Harbor tasks, whatever wrote them.

Rows are counted from 1, lines of JSON as an editor counts them. Nothing of a file is trusted: what cannot be read, or
is no row, is a ``RowError`` that names the row, the column and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from plaudit_job.data_row import IMAGES_COLUMN, REQUIRED_COLUMNS, DataRow, data_row, refused_media
from plaudit_job.tasks import TASK_FILE, TaskError, read_tasks
from plaudit_wire.errors import RefusedError, described
from plaudit_wire.plain import PlainDataError, json_value

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Some programs begin a text with it."""
_ROWS_AT_A_TIME = 4096
_ROWS_WITH_IMAGES = 64
_SHOWN_PATH = 160
_NEEDED_COLUMNS = "Rows need data_source, prompt (messages or text) and reward_model: {ground_truth: …}"
_ONE_A_LINE = "Write one JSON object a line, as jq -c does; null in place of NaN"


class RowError(RefusedError):
    """A file of rows, or one of its rows, is wrong.

    ``complaint`` follows the name of the file: ``row 3: column prompt is 7``.
    """

    def __init__(self, path: Path | str, complaint: str, remedy: str = _NEEDED_COLUMNS) -> None:
        super().__init__(f"data file {path}: {complaint}. {remedy}")
        self.complaint, self.remedy = complaint, remedy

    @classmethod
    def of_row(cls, path: Path | str, number: int, error: PlainDataError) -> RowError:
        """Return the error of a row whose column ``error.where`` is wrong."""
        where = error.where if len(error.where) <= _SHOWN_PATH else f"{error.where[: _SHOWN_PATH - 1]}…"
        return cls(path, f"row {number}: column {where} {error.complaint}", error.remedy[0].upper() + error.remedy[1:])


class NumberedRow(NamedTuple):
    """Hold one row of a data file."""

    number: int
    row: DataRow
    images: Any
    """Its column ``images`` as written; None if the job reads none."""


def checked_rows(path: Path, *, images: bool = False) -> Iterator[NumberedRow]:
    """Yield every row of a data file as plain data.

    Args:
        images: The job reads images.

    Raises:
        RowError: The file or a row is wrong.
    """
    number = 0
    columns = (*REQUIRED_COLUMNS, "extra_info", *([IMAGES_COLUMN] if images else []))
    for number, row in enumerate(raw_rows(path, columns), 1):  # counted
        try:
            yield NumberedRow(number, data_row(row, images=images), row.get(IMAGES_COLUMN))
        except PlainDataError as error:
            raise RowError.of_row(path, number, error) from None
    if number == 0:
        raise RowError(path, "has no rows")


def raw_rows(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield these columns of every row as written; a column that the file does not have is missing in them.

    Raise ``RowError`` if the file cannot be read, lacks a required column, or has one that nobody would read.
    """
    if path.is_dir():
        yield from _task_rows(path)
        return
    if not path.is_file():
        raise RowError(
            path, "does not exist", "Write the data first, or correct the path: it is relative to the job file"
        )
    readers = {".parquet": _parquet_rows, ".jsonl": _json_rows}
    if path.suffix not in readers:
        raise RowError(path, f"ends with {path.suffix!r}", "Give a .parquet or a .jsonl file")
    try:
        yield from readers[path.suffix](path, columns)
    except OSError as error:
        raise RowError(path, f"cannot be read: {error.strerror or error}", "Write the file again") from error


def _task_rows(path: Path) -> Iterator[dict[str, Any]]:
    if not (path / TASK_FILE).is_file() and not any(path.glob(f"*/{TASK_FILE}")):
        complaint = f"is a folder without Harbor tasks: neither it nor a folder in it has a {TASK_FILE}"
        raise RowError(path, complaint, "Give a .parquet or .jsonl file, or a folder of tasks")
    try:
        yield from (task.row() for task in read_tasks(path))
    except TaskError as error:
        raise RowError(
            path, str(error).rstrip("."), "Mend or remove the task; plaudit tasks checks all of them"
        ) from None


def _parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            _refuse_columns(path, names, columns)
            at_a_time = _ROWS_WITH_IMAGES if IMAGES_COLUMN in columns else _ROWS_AT_A_TIME
            yield from parquet_rows(path, file, [name for name in columns if name in names], at_a_time)
    except pyarrow.ArrowException as error:
        raise RowError(path, f"is not a Parquet file ({error})", "Write the file again") from error


def parquet_rows(
    path: Path, file: pyarrow.parquet.ParquetFile, columns: list[str], at_a_time: int
) -> Iterator[dict[str, Any]]:
    """Yield the rows of an open Parquet file; raise ``RowError`` for a value that Python cannot hold."""
    number = 0
    for batch in file.iter_batches(at_a_time, columns=columns):
        try:
            rows = batch.to_pylist(maps_as_pydicts="strict")
        except Exception:  # such as a time in nanoseconds, a year beyond 9999, bytes in a text
            rows = [_read_row(path, number + place, batch.slice(place - 1, 1)) for place in range(1, len(batch) + 1)]
        number += len(rows)
        yield from rows


def _read_row(path: Path, number: int, row: pyarrow.RecordBatch) -> dict[str, Any]:
    read = {}
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            read[name] = column.to_pylist(maps_as_pydicts="strict")[0]
        except Exception as error:
            complaint = f"row {number}: column {name} cannot be read ({described(error)})"
            raise RowError(path, complaint, "Write its values as text") from error
    return read


def _json_rows(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            text = line.removeprefix(BYTE_ORDER_MARK)
            if not text.strip():
                continue
            try:
                row = json_value(text)
            except PlainDataError as error:
                raise RowError(path, f"line {number}: {error.complaint}", _ONE_A_LINE) from None
            if not isinstance(row, dict):
                raise RowError(path, f"line {number}: is no JSON object", _ONE_A_LINE)
            _refuse_columns(path, list(row), columns, f"line {number}: ")
            yield row


def _refuse_columns(path: Path, names: Sequence[str], columns: Sequence[str], place: str = "") -> None:
    missing = [name for name in REQUIRED_COLUMNS if name in columns and name not in names]
    if missing:
        noun, found = "column" if len(missing) == 1 else "columns", ", ".join(names) or "none"
        raise RowError(path, f"{place}lacks {noun} {', '.join(missing)} (it has {found})")
    for column, remedy in refused_media(IMAGES_COLUMN in columns).items():
        if column in names and "prompt" in columns:
            raise RowError(path, f"{place}has column {column}", remedy)
