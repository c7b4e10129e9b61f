"""Write samples with both scores as Parquet or JSON lines, by the file's extension; completely or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet

from plaudit_wire.errors import RefusedError
from plaudit_wire.records import ScoringRecord
from plaudit_workers.rescore.rows import StoredSample
from plaudit_workers.whole_files import whole_file

_ROWS_AT_A_TIME = 1024
_TEXT, _WHOLE, _REAL = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
_COLUMNS: dict[str, pyarrow.DataType] = {
    "step": _WHOLE,
    "group": _TEXT,
    "index": _WHOLE,
    "data_source": _TEXT,
    "prompt": _TEXT,
    "response": _TEXT,
    "outcome_before": _TEXT,
    "score_before": _REAL,
    "outcome": _TEXT,
    "score": _REAL,
    "reason": _TEXT,
}
_SCORER_COLUMNS: dict[str, pyarrow.DataType] = {"value": _REAL, "outcome": _TEXT, "reason": _TEXT}

Write = Callable[[StoredSample, ScoringRecord], object]


def check_ending(target: Path | None) -> None:
    """Raise ``RefusedError`` if the name of the output has an ending that cannot be written."""
    if target is not None and target.suffix not in (".jsonl", ".parquet"):
        raise RefusedError(f"--output {target}: end its name in .parquet or .jsonl")


@contextmanager
def written_rows(target: Path | None, scorers: list[str]) -> Iterator[Write]:
    """Yield a function that writes one sample; ``target`` appears when the block ends without an error."""
    if target is None:
        yield lambda stored, scoring: None
    elif target.suffix == ".jsonl":
        with whole_file(target) as temporary, temporary.open("wb") as file:
            yield lambda stored, scoring: file.write(msgspec.json.encode(_row(stored, scoring)) + b"\n")
    else:
        with whole_file(target) as temporary, _ParquetRows(temporary, scorers) as rows:
            yield lambda stored, scoring: rows.add(_row(stored, scoring))


def _row(stored: StoredSample, scoring: ScoringRecord) -> dict[str, Any]:
    sample = stored.sample
    row: dict[str, Any] = {
        name: getattr(sample, name) for name in ("group", "index", "data_source", "prompt", "response")
    }
    row |= {"step": stored.step, "outcome_before": stored.outcome, "score_before": stored.score}
    row |= {"outcome": scoring.outcome, "score": scoring.value, "reason": scoring.reason}
    for name, scorer in scoring.scorers.items():
        row |= {f"scorer/{name}/{column}": getattr(scorer, column) for column in _SCORER_COLUMNS}
    return row


class _ParquetRows:
    def __init__(self, path: Path, scorers: list[str]) -> None:
        of_scorers = {f"scorer/{name}/{column}": kind for name in scorers for column, kind in _SCORER_COLUMNS.items()}
        self._schema = pyarrow.schema(_COLUMNS | of_scorers)
        self._writer = pyarrow.parquet.ParquetWriter(path, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []

    def __enter__(self) -> _ParquetRows:
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()
        self._writer.close()

    def add(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        if len(self._rows) == _ROWS_AT_A_TIME:
            self._flush()

    def _flush(self) -> None:
        self._writer.write_table(pyarrow.Table.from_pylist(self._rows, schema=self._schema))
        self._rows.clear()
