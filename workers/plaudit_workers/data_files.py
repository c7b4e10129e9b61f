"""Read the rows of data files one by one: Parquet, JSON, Arrow and folders of Harbor tasks, as streams.

A path is a file, a pattern or a folder of files. Rows are counted from 1 in each file, lines of JSON as an editor
counts them. Nothing of a file is trusted: what cannot be read, or is no row, is a ``RowError`` that names the file, the
row, the column and the remedy.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from plaudit_job.data_row import (
    IMAGES_COLUMN,
    DataRow,
    data_row,
    needed_columns,
    read_columns,
    refused_media,
)
from plaudit_job.fields import is_address
from plaudit_job.spec.rollout import ColumnsSpec, DataSpec, TrainDataSpec
from plaudit_job.tasks import TASK_FILE, TaskError, read_tasks
from plaudit_wire.errors import RefusedError, described
from plaudit_wire.plain import PlainDataError, json_value

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Some programs begin a text with it."""
_ROWS_AT_A_TIME = 512
"""Python's garbage collector looks at all that is alive: with thousands of rows it took a quarter of the time."""
_ROWS_WITH_IMAGES = 64
_BUFFER_BYTES = 1 << 20
_SHOWN_PATH = 160
_SHOWN_NAMES = 8
_LARGEST_ARRAY_BYTES = 1 << 30
_LONGEST_LINE = 256 << 20
_NEEDED_COLUMNS = "Rows need data_source, prompt (messages or text) and reward_model: {ground_truth: …}"
_ONE_A_LINE = "Write one JSON object a line, as jq -c does"
_WRITE_FIRST = "Write the data first, or correct the path: it is relative to the job file"
_DOWNLOAD = "Rows are read from files of this machine: download them, then give their path"
_WRITE_AGAIN = "Write the file again"
_SPLIT = re.compile(r"(train|training|test|testing|val|valid|validation|dev|eval)(?=[-_.]|$)", re.IGNORECASE)
"""The split in the name of a shard, as the hub names them."""
_TRUTHS = ("ground_truth", "answer", "solution", "completion", "label", "target", "final_answer", "expected_answer")
_PROMPTS = ("prompt", "messages", "question", "problem", "instruction", "input", "query")


class RowError(RefusedError):
    """A file of rows, or one of its rows, is wrong.

    ``complaint`` follows the name of the file: ``row 3: column prompt is 7``.
    """

    def __init__(self, path: Path | str, complaint: str, remedy: str = _NEEDED_COLUMNS) -> None:
        super().__init__(f"data file {path}: {complaint.removesuffix('.')}. {remedy}")
        self.path, self.complaint, self.remedy = Path(path), complaint, remedy

    @classmethod
    def of_row(cls, path: Path | str, number: int, error: PlainDataError) -> RowError:
        """Return the error of a row whose column ``error.where`` is wrong."""
        where = error.where if len(error.where) <= _SHOWN_PATH else f"{error.where[: _SHOWN_PATH - 1]}…"
        return cls(path, f"row {number}: column {where} {error.complaint}", error.remedy[0].upper() + error.remedy[1:])


class NumberedRow(NamedTuple):
    """Hold one row of a data file."""

    path: Path
    """Its file."""
    number: int
    row: DataRow
    images: Any
    """Its column ``images`` as written; None if the job reads none."""


@dataclass(frozen=True)
class RowForm:
    """Say how a job reads rows."""

    columns: ColumnsSpec | None = None
    """``data.columns``."""
    images: bool = False
    """The job reads images."""

    @classmethod
    def of_data(cls, data: DataSpec) -> RowForm:
        """Return the form of a job's rows."""
        return cls(data.columns, data.images is not None)


VERL = RowForm()
"""Verl's columns, without images."""


class DataFile(NamedTuple):
    """Name one file, and the origin of its rows where they name none."""

    path: Path
    source: str


def files_of(path: str | Path) -> list[DataFile]:
    """Return the files of a path, which is one, a pattern or a folder; in the order of their names.

    Raise ``RowError`` if there is none, or if they are no rows of one kind.
    """
    path = Path(path)
    if _holds_tasks(path):
        return [DataFile(path, path.name)]
    if os.path.isdir(path):  # unlike pathlib's, it takes a name that is too long
        found = _saved_files(path) or _shards(path, path.iterdir())
        return [DataFile(file, path.name) for file in found]
    if os.path.isfile(path) or not glob.has_magic(str(path)):
        return [DataFile(path, path.name.split(".")[0])]
    matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
    if not matches:
        raise RowError(path, "matches no file", _WRITE_FIRST)
    return [DataFile(file, path.parent.name) for file in _shards(path, matches)]


def _saved_files(folder: Path) -> list[Path]:
    """Return the files of a folder that ``save_to_disk`` of ``datasets`` wrote, in order; none of another folder."""
    if (folder / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(each.name for each in folder.iterdir() if each.is_dir())) or "none"
        raise RowError(folder, f"is a dataset of several splits ({splits})", "Name the folder of one, such as …/train")
    state = folder / "state.json"
    if not state.is_file():
        return []
    try:
        names = [entry["filename"] for entry in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        complaint = f"has a state.json that save_to_disk of datasets did not write ({described(error)})"
        raise RowError(folder, complaint, "Save the dataset again") from error
    return [folder / name for name in names]


def _shards(path: Path, found: Iterator[Path] | Sequence[Path]) -> list[Path]:
    """Return the data files among these, all of one kind and one split."""
    files = sorted(file for file in found if file.is_file() and kind_of(file) and not file.name.startswith((".", "_")))
    if not files:
        raise RowError(
            path, "holds no data file", f"Give files that end with {', '.join(READERS)}, or a folder of Harbor tasks"
        )
    kinds = sorted({kind_of(file) for file in files})
    if len(kinds) > 1:
        raise RowError(path, f"holds files of several kinds: {', '.join(kinds)}", "Name those of one: …/*.parquet")
    splits = sorted({match[0].lower() for file in files if (match := _SPLIT.match(file.name))})
    if len(splits) > 1:
        complaint = f"holds files of several splits: {', '.join(splits)}"
        raise RowError(path, complaint, f"Name those of one: …/{splits[0]}*{kinds[0]}")
    return files


def kind_of(path: Path) -> str:
    """Return the end of a file's name by which it is read; empty for others."""
    return next((end for end in READERS if path.name.lower().endswith(end)), "")


def data_paths(section: TrainDataSpec) -> list[str]:
    """Return the paths of a section's data: a file, a pattern or a folder each."""
    return [entry.path for entry in section.mixture] or [section.source]


def checked_rows(path: str | Path, form: RowForm = VERL) -> Iterator[NumberedRow]:
    """Yield every row of a file, a pattern or a folder as plain data.

    Raises:
        RowError: A file or a row is wrong.
    """
    for file, source in files_of(path):
        number = 0
        for number, row in enumerate(raw_rows(file, form), 1):  # counted
            try:
                made = data_row(row, columns=form.columns, source=source, images=form.images)
            except PlainDataError as error:
                raise RowError.of_row(file, number, error) from None
            yield NumberedRow(file, number, made, row.get(IMAGES_COLUMN) if form.images else None)
        if number == 0:
            raise RowError(file, "has no rows")


def raw_rows(path: Path, form: RowForm = VERL, further: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield every row of a file with the columns that the form reads; those that the file does not have are missing.

    Raise ``RowError`` if the file cannot be read, lacks a required column, or has one that nobody would read.

    Args:
        further: columns to read as well.
    """
    if _holds_tasks(path):
        yield from _task_rows(path)
        return
    if not os.path.isfile(path):
        remedy = _DOWNLOAD if is_address(str(path)) else _WRITE_FIRST
        raise RowError(
            path,
            "does not exist" if not os.path.exists(path) else f"is a {'folder' if os.path.isdir(path) else 'device'}",
            remedy,
        )
    kind = kind_of(path)
    if not kind:
        raise RowError(path, f"ends with {path.suffix!r}", f"Give a file that ends with {', '.join(READERS)}")
    try:
        yield from READERS[kind](path, _Columns(path, form, further))
    except OSError as error:
        raise RowError(path, f"cannot be read: {error.strerror or error}", _WRITE_AGAIN) from error


def _holds_tasks(path: Path) -> bool:
    return os.path.isdir(path) and (os.path.isfile(path / TASK_FILE) or any(path.glob(f"*/{TASK_FILE}")))


def _task_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        yield from (task.row() for task in read_tasks(path))
    except TaskError as error:
        raise RowError(
            path, str(error).rstrip("."), "Mend or remove the task; plaudit tasks checks all of them"
        ) from None


class _Columns:
    """Choose the columns to read, and refuse files without those that are needed."""

    def __init__(self, path: Path, form: RowForm, further: Sequence[str]) -> None:
        self._path, self._form = path, form
        self._needed = needed_columns(form.columns)
        wanted = read_columns(form.columns, form.images)
        self._wanted = None if wanted is None else {*wanted, *further}
        self.at_a_time = _ROWS_WITH_IMAGES if form.images else _ROWS_AT_A_TIME

    def read(self, names: Sequence[str], place: str = "") -> list[str]:
        """Return those of a table's or a row's columns that are read; raise ``RowError``."""
        missing = [name for name in self._needed if name not in names]
        if missing:
            noun, found = "column" if len(missing) == 1 else "columns", _listed(names) or "none"
            raise RowError(
                self._path, f"{place}lacks {noun} {', '.join(missing)} (it has {found})", self._missing_remedy(names)
            )
        for column, remedy in refused_media(self._form.images).items():
            if column in names:
                raise RowError(self._path, f"{place}has column {column}", remedy)
        read = [name for name in names if self._wanted is None or name in self._wanted]
        if twice := sorted({name for name in read if read.count(name) > 1}):
            raise RowError(self._path, f"{place}has several columns {', '.join(twice)}", "Remove or rename all but one")
        return read

    def _missing_remedy(self, names: Sequence[str]) -> str:
        """Say which fields of ``data.columns`` would read the file, if its names are known ones."""
        if self._form.columns is not None:
            return "Correct data.columns"
        prompt = next((name for name in _PROMPTS if name in names), None)
        truth = next((name for name in _TRUTHS if name in names), "messages" if prompt == "messages" else None)
        if prompt is None:
            return _NEEDED_COLUMNS
        fields = [f"prompt: {prompt}"] * (prompt != "prompt") + [f"groundTruth: {truth}"] * (truth is not None)
        return f"{_NEEDED_COLUMNS}; for these columns, set spec.data.columns: {{{', '.join(fields)}}}"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN_NAMES])
    return shown if len(names) <= _SHOWN_NAMES else f"{shown} and {len(names) - _SHOWN_NAMES} more"


def _parquet_rows(path: Path, columns: _Columns) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        # Without pre_buffer a row group, which may be the whole file, is not read at once.
        with pyarrow.parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
            names = columns.read(file.schema_arrow.names)
            yield from batch_rows(path, file.iter_batches(columns.at_a_time, columns=names))
    except pyarrow.ArrowException as error:
        raise RowError(path, f"is not a Parquet file ({error})", _WRITE_AGAIN) from error


def _arrow_rows(path: Path, columns: _Columns) -> Iterator[dict[str, Any]]:
    """Yield the rows of an Arrow file, or of an Arrow stream, which ``datasets`` writes under the same ending."""
    import pyarrow

    try:
        # Not mapped to memory: reading a file that is cut meanwhile would end the process (SIGBUS).
        with pyarrow.OSFile(str(path)) as source:
            reader: Any
            try:
                reader = pyarrow.ipc.open_file(source)
                batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
            except pyarrow.ArrowInvalid:
                source.seek(0)
                reader = batches = pyarrow.ipc.open_stream(source)
            names = columns.read(reader.schema.names)
            parts = (
                batch.select(names).slice(start, columns.at_a_time)
                for batch in batches
                for start in range(0, len(batch), columns.at_a_time)
            )
            yield from batch_rows(path, parts)
    except pyarrow.ArrowException as error:
        raise RowError(path, f"is not an Arrow file ({error})", _WRITE_AGAIN) from error


def batch_rows(path: Path, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file's batches; raise ``RowError`` for a value that Python cannot hold."""
    number = 0
    for batch in batches:
        try:
            rows = _dictionaries(batch.schema.names, [_values(column) for column in batch.columns], len(batch))
        except Exception:  # such as a time in nanoseconds, a year beyond 9999, bytes in a text
            rows = [_read_row(path, number + place, batch.slice(place - 1, 1)) for place in range(1, len(batch) + 1)]
        number += len(rows)
        yield from rows


def _values(array: pyarrow.Array) -> list[Any]:
    """Return an array in Python's types.

    Lists and structs are made of their parts' columns, and texts through NumPy: pyarrow makes an object for each part
    of each row, which takes several times as long.
    """
    import pyarrow.types as types

    if not len(array):  # it may have no offsets
        return []
    kind, values = array.type, list[Any]()
    if types.is_struct(kind) and len({field.name for field in kind}) == kind.num_fields > 0:
        names = [field.name for field in kind]
        values = _dictionaries(names, [_values(part) for part in array.flatten()], len(array))
    elif types.is_list(kind) or types.is_large_list(kind):
        ends = array.offsets.to_pylist()
        parts = _values(array.values.slice(ends[0], ends[-1] - ends[0]))
        values = [parts[start - ends[0] : end - ends[0]] for start, end in pairwise(ends)]
    elif types.is_string(kind) or types.is_large_string(kind):
        values = array.to_numpy(zero_copy_only=False).tolist()
    else:
        values = array.to_pylist(maps_as_pydicts="strict")
    if types.is_nested(kind) and array.null_count:
        values = [value if valid else None for value, valid in zip(values, array.is_valid().to_pylist(), strict=True)]
    return values


def _dictionaries(names: Sequence[str], columns: Sequence[list[Any]], length: int) -> list[dict[str, Any]]:
    rows = zip(*columns, strict=True) if columns else ((),) * length
    return [dict(zip(names, row, strict=True)) for row in rows]


def _read_row(path: Path, number: int, row: pyarrow.RecordBatch) -> dict[str, Any]:
    read = {}
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            read[name] = column.to_pylist(maps_as_pydicts="strict")[0]
        except Exception as error:
            complaint = f"row {number}: column {name} cannot be read ({described(error)})"
            raise RowError(path, complaint, "Write its values as text") from error
    return read


def _json_lines(path: Path, columns: _Columns) -> Iterator[dict[str, Any]]:
    with path.open("rb") as lines:
        yield from _rows_of_lines(path, lines, columns)


def _compressed_lines(path: Path, columns: _Columns) -> Iterator[dict[str, Any]]:
    import io

    import pyarrow

    form = "gzip" if path.suffix.lower() == ".gz" else "zstd"
    with pyarrow.input_stream(str(path), compression=form) as stream:
        yield from _rows_of_lines(path, io.BufferedReader(stream, _BUFFER_BYTES), columns)


def _rows_of_lines(path: Path, lines: IO[bytes], columns: _Columns) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(iter(partial(whole_line, lines, f"data file {path}"), b""), 1):
        text = line.removeprefix(BYTE_ORDER_MARK)
        if not text.strip():
            continue
        if number == 1 and text.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise RowError(path, "is UTF-16 text", "Write it again as UTF-8")
        try:
            row = json_value(text, nan=True)
        except PlainDataError as error:
            raise RowError(path, f"line {number}: {error.complaint}", _ONE_A_LINE) from None
        yield _json_row(path, row, columns, f"line {number}: ")


def whole_line(file: IO[bytes], name: str) -> bytes:
    """Return the next line, empty at the end; refuse one that would fill the memory, as a small compressed file can."""
    line = file.readline(_LONGEST_LINE + 1)
    if len(line) > _LONGEST_LINE:
        raise RefusedError(f"{name} has a line above {_LONGEST_LINE >> 20} MiB: write one JSON object a line")
    return line


def _json_rows(path: Path, columns: _Columns) -> Iterator[dict[str, Any]]:
    """Yield the rows of a .json file: an array of rows, or one row a line, as ``to_json`` of ``datasets`` writes."""
    with path.open("rb") as file:
        first = file.readline(_BUFFER_BYTES).removeprefix(BYTE_ORDER_MARK).strip()
        if _is_row(first):
            file.seek(0)
            yield from _rows_of_lines(path, file, columns)
            return
        if path.stat().st_size > _LARGEST_ARRAY_BYTES:
            complaint = f"is one JSON value of more than {_LARGEST_ARRAY_BYTES >> 30} GiB"
            raise RowError(path, complaint, "Write one row a line: jq -c '.[]' FILE.json > FILE.jsonl")
        file.seek(0)
        text = file.read().removeprefix(BYTE_ORDER_MARK)
    try:
        rows = json_value(text, nan=True)
    except PlainDataError as error:
        raise RowError(path, error.complaint, _ONE_A_LINE) from None
    if isinstance(rows, dict) and len(rows) == 1:  # such as {"data": […]}
        rows = next(iter(rows.values()))
    if not isinstance(rows, list):
        remedy = "Write an array of rows ([{…}, …]; of pandas: orient='records'), or one row a line as .jsonl"
        raise RowError(path, "holds no rows, but columns" if isinstance(rows, dict) else "is no JSON array", remedy)
    for number, row in enumerate(rows, 1):
        yield _json_row(path, row, columns, f"row {number}: ")


def _is_row(line: bytes) -> bool:
    """Return True for a line that is a row; a whole table is {column: {row: value}}, or a list below one key."""
    try:
        row = json_value(line, nan=True)
    except PlainDataError:
        return False
    if not isinstance(row, dict):
        return False
    return not all(isinstance(value, dict) for value in row.values()) and not (
        len(row) == 1 and isinstance(next(iter(row.values())), list)
    )


def _json_row(path: Path, row: Any, columns: _Columns, place: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise RowError(path, f"{place}is no JSON object", _ONE_A_LINE)
    read = columns.read(list(row), place)
    return row if len(read) == len(row) else {name: row[name] for name in read}


Reader = Callable[[Path, _Columns], Iterator[dict[str, Any]]]
READERS: dict[str, Reader] = {
    ".parquet": _parquet_rows,
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".jsonl.gz": _compressed_lines,
    ".jsonl.zst": _compressed_lines,
    ".json": _json_rows,
    ".arrow": _arrow_rows,
}
"""Ends of files' names and what reads such files."""
