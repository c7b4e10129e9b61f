"""Search a run's stored samples page by page. A page costs a bounded amount of work, however many samples there are.

A search walks the files of the steps from the newest to the oldest. Files whose footer excludes the query are skipped;
the footers' bounds are remembered, since a file never changes. Conditions are evaluated on columns without reading
texts, and only the row groups of the found rows are read. A page ends when it is full, after ``MOST_FILES`` opened
files, or after ``MOST_BYTES`` of decompressed texts; it then names the place at which the next page begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet
from numpy.typing import NDArray

from plaudit_metrics.sources.sample_schema import scorer_column
from plaudit_metrics.sources.samples import UnreadableFileError
from plaudit_wire.records import OUTCOMES

if TYPE_CHECKING:
    from plaudit_metrics.sources.samples import ListedSample

FAILED = "failed"
"""As ``outcome``: every outcome but ``scored``."""
_SCORED = "scored"
_NO_FAILURE = (_SCORED, "skipped")
_EQUAL = ("data_source", "split", "group", "prompt_id")
_BOUNDED = ("outcome", "score", "data_source", "split")
_FIRST_SAMPLES = 16
"""The first samples of a step, which are those of whole groups."""
_FAILED_SAMPLES = 4
MOST_FILES = 128
MOST_BYTES = 32 << 20
SampleOrder = Literal["stored", "lowest", "highest"]
RowNumbers = NDArray[np.int64]
Row = dict[str, Any]


class Place(NamedTuple):
    """Name the place of a sample in a search."""

    step: int
    skip: int = 0
    """Matching samples of this step that precede it."""

    def __str__(self) -> str:
        return f"{self.step}.{self.skip}"


class SamplePage(NamedTuple):
    """Hold a part of a search's samples."""

    rows: list[Row]
    next: Place | None
    """The beginning of the next page; None at the end."""


class SampleSearch:
    """Search files for rows of these columns, and remember the bounds of each file."""

    def __init__(self, columns: list[str]) -> None:
        self._columns = columns
        self._bounds: dict[Path, Mapping[str, Bounds]] = {}

    def page(self, files: Mapping[int, Path], query: SampleQuery, start: Place | None, most: int) -> SamplePage:
        """Return the next samples of a search, at most ``most``; raise ``UnreadableFileError`` for a damaged file.

        ``files`` are by step; the page begins at ``start``, None with the newest step.
        """
        rows: list[Row] = []
        spent_bytes, opened = 0, 0
        for step in sorted(files, reverse=True):
            if (start is not None and step > start.step) or query.excludes(self._bounds.get(files[step], {})):
                continue
            if len(rows) >= most or opened >= MOST_FILES or spent_bytes >= MOST_BYTES:
                return SamplePage(rows, Place(step))
            opened += 1
            skip = start.skip if start is not None and step == start.step else 0
            with SampleFile(files[step], self._columns) as file:
                bounds = self._bounds.setdefault(files[step], file.bounds())
                found = [] if query.excludes(bounds) else file.find(query)[skip:].tolist()
                for number, row in enumerate(found):
                    if len(rows) >= most or spent_bytes >= MOST_BYTES:
                        return SamplePage(rows, Place(step, skip + number))
                    spent_bytes += file.cost_bytes(row)
                    rows.append(file.read(row))
        return SamplePage(rows, None)


def few_samples(path: Path) -> list[Row]:
    """Return the first 16 samples of a file, and the first four that have no score."""
    with SampleFile(path) as file:
        first = file.find(SampleQuery())[:_FIRST_SAMPLES].tolist()
        failed = file.find(SampleQuery(outcome=FAILED))[:_FAILED_SAMPLES].tolist()
        return [file.read(row) for row in dict.fromkeys(first + failed)]


def samples_of_group(path: Path, group: str) -> Iterator[Row]:
    """Yield the samples of one group in a file."""
    with SampleFile(path) as file:
        yield from map(file.read, file.find(SampleQuery(group=group)).tolist())


class Bounds(NamedTuple):
    """Hold the least and the greatest value of a column in a file, from the statistics of its footer."""

    least: str | float
    greatest: str | float
    nulls: bool


@dataclass(frozen=True)
class SampleQuery:
    """Hold conditions that a sample fulfils together; an empty one accepts every sample."""

    outcome: str = ""
    """An outcome, or ``failed``."""
    scorer: str = ""
    """The scorer that ``outcome`` is of; empty: the sample's own. Only files are searched by it."""
    lowest: float | None = None
    """The least score."""
    highest: float | None = None
    """The greatest score."""
    data_source: str = ""
    split: str = ""
    group: str = ""
    prompt_id: str = ""
    order: SampleOrder = "stored"
    """Of the samples of one step; without a score they come last."""

    def excludes(self, bounds: Mapping[str, Bounds]) -> bool:
        """Return True if no sample of a file with these bounds can fulfil the conditions."""
        outcome = None if self.scorer else bounds.get("outcome")
        if self.outcome == FAILED and outcome and outcome[:2] == (_SCORED, _SCORED) and not outcome.nulls:
            return True
        wanted: dict[str, tuple[str | float | None, str | float | None]] = {
            name: (value, value) for name in _EQUAL if (value := getattr(self, name))
        }
        if self.outcome and self.outcome != FAILED and not self.scorer:
            wanted["outcome"] = (self.outcome, self.outcome)
        wanted["score"] = (self.lowest, self.highest)
        return any(name in bounds and _apart(bounds[name], *span) for name, span in wanted.items())

    def accepts(self, sample: ListedSample) -> bool:
        """Return True if one sample fulfils the conditions."""
        if any((wanted := getattr(self, name)) and wanted != getattr(sample, name) for name in _EQUAL):
            return False
        failed = sample.outcome != _SCORED
        if self.outcome and not (failed if self.outcome == FAILED else sample.outcome == self.outcome):
            return False
        if self.lowest is None and self.highest is None:
            return True
        lowest = -math.inf if self.lowest is None else self.lowest
        highest = math.inf if self.highest is None else self.highest
        return sample.score is not None and lowest <= sample.score <= highest

    def columns(self) -> list[str]:
        """Return the columns that the conditions and the order read."""
        names = [name for name in _EQUAL if getattr(self, name)]
        names += [self._outcome_column] if self.outcome else []
        by_score = self.order != "stored" or self.lowest is not None or self.highest is not None
        return names + (["score"] if by_score else [])

    @property
    def _outcome_column(self) -> str:
        return scorer_column(self.scorer, "outcome") if self.scorer else "outcome"

    def _of_outcome(self, table: pyarrow.Table) -> NDArray[np.bool_]:
        """Return which rows have the outcome; a scorer that was not asked, or does not apply, has not failed."""
        if self.outcome != FAILED:
            return _equals(table, self._outcome_column, self.outcome)
        if not self.scorer:
            return ~_equals(table, "outcome", _SCORED)
        failures = [_equals(table, self._outcome_column, outcome) for outcome in OUTCOMES if outcome not in _NO_FAILURE]
        return np.asarray(np.any(failures, axis=0), dtype=np.bool_)

    def rows(self, table: pyarrow.Table) -> RowNumbers:
        """Return the numbers of the rows that fulfil the conditions, in the query's order.

        The table has at least ``columns()`` of a file; a column that an old file lacks accepts nothing.
        """
        mask = np.ones(len(table), dtype=np.bool_)
        for name in _EQUAL:
            if value := getattr(self, name):
                mask &= _equals(table, name, value)
        if self.outcome:
            mask &= self._of_outcome(table)
        found = np.flatnonzero(mask)
        if "score" not in self.columns():
            return found
        score = table.column("score").to_numpy().astype(np.float64)[found]
        inside = np.ones(len(found), dtype=np.bool_)
        if self.lowest is not None:
            inside &= score >= self.lowest
        if self.highest is not None:
            inside &= score <= self.highest
        found, score = found[inside], score[inside]
        if self.order == "stored":
            return found
        return found[np.argsort(-score if self.order == "highest" else score, kind="stable")]


def _apart(bounds: Bounds, least: str | float | None, greatest: str | float | None) -> bool:
    above = least is not None and bounds.greatest < least  # type: ignore[operator]  # of one column: of one type
    return above or (greatest is not None and bounds.least > greatest)  # type: ignore[operator]


def _equals(table: pyarrow.Table, name: str, value: str) -> NDArray[np.bool_]:
    if name not in table.column_names:
        return np.zeros(len(table), dtype=np.bool_)
    equal = pyarrow.compute.fill_null(pyarrow.compute.equal(table.column(name), value), False)
    return np.asarray(equal, dtype=np.bool_)


class SampleFile:
    """Read one file of stored samples, all columns or some; use as a context manager.

    Columns that the file lacks are None in its rows. All methods raise ``UnreadableFileError`` for a damaged file, the
    first for one that is not Parquet, or that lacks ``group``, ``outcome`` or ``score``.
    """

    def __init__(self, path: Path, columns: Sequence[str] | None = None) -> None:
        self._path = path
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
        except (pyarrow.ArrowException, OSError) as error:
            raise UnreadableFileError(f"{path} cannot be read: {error}") from error
        self._metadata = self._file.metadata
        self._places = {self._metadata.schema.column(place).path: place for place in range(self._metadata.num_columns)}
        if missing := {"group", "outcome", "score"} - self._places.keys():
            self._file.close()
            raise UnreadableFileError(f"{path} does not hold stored samples: it lacks {', '.join(sorted(missing))}")
        self._missing = [name for name in columns or [] if name not in self._places]
        self._columns = None if columns is None else [name for name in columns if name in self._places]
        groups = range(self._metadata.num_row_groups)
        self._starts = np.cumsum([0, *(self._metadata.row_group(each).num_rows for each in groups)])
        self._tables: dict[int, pyarrow.Table] = {}

    def __enter__(self) -> SampleFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def bounds(self) -> dict[str, Bounds]:
        """Return the bounds of the columns that queries compare, where the footer has them."""
        found = {}
        for name in _BOUNDED:
            place = self._places.get(name)
            if place is None:
                continue
            of_groups = [
                self._metadata.row_group(each).column(place).statistics for each in range(self._metadata.num_row_groups)
            ]
            if of_groups and all(each is not None and each.has_min_max for each in of_groups):
                least, greatest = min(each.min for each in of_groups), max(each.max for each in of_groups)
                found[name] = Bounds(least, greatest, any(each.null_count for each in of_groups))
        return found

    def find(self, query: SampleQuery) -> RowNumbers:
        """Return the numbers of the rows that match, in the query's order."""
        columns = [name for name in query.columns() if name in self._places] or ["outcome"]
        return query.rows(self._guarded(lambda: self._file.read(columns, use_threads=False)))

    def cost_bytes(self, row: int) -> int:
        """Return the bytes that reading a row decompresses; 0 when its row group has been read."""
        group = self._group_of(row)
        if group in self._tables:
            return 0
        chunks = self._metadata.row_group(group)
        places = range(chunks.num_columns) if self._columns is None else map(self._places.__getitem__, self._columns)
        return sum(int(chunks.column(place).total_uncompressed_size) for place in places)

    def read(self, row: int) -> Row:
        """Return a row."""
        group = self._group_of(row)
        table = self._tables.get(group)
        if table is None:
            table = self._guarded(lambda: self._file.read_row_group(group, self._columns, use_threads=False))
            self._tables[group] = table
        (found,) = table.slice(row - int(self._starts[group]), 1).to_pylist()
        return {**dict.fromkeys(self._missing), **found}

    def _group_of(self, row: int) -> int:
        return int(np.searchsorted(self._starts, row, side="right")) - 1

    def _guarded(self, read: Any) -> pyarrow.Table:
        try:
            return read()
        except (pyarrow.ArrowException, OSError) as error:
            raise UnreadableFileError(f"{self._path} cannot be read: {error}") from error
