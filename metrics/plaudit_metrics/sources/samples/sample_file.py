"""Read single rows of one file of stored samples: only the row groups that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from plaudit_metrics.sources.samples.files import UnreadableFileError
from plaudit_metrics.sources.samples.query import Bounds, RowNumbers, SampleQuery

Row = dict[str, Any]

_BOUNDED = ("outcome", "score", "data_source", "split")


class SampleFile:
    """Read one file of stored samples; use as a context manager.

    Args:
        columns: the columns of the rows; None reads all. Columns that the file lacks are None.

    Raises:
        UnreadableFileError: it is not a readable Parquet file, or it lacks ``group``, ``outcome`` or ``score``.
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
        """Return the numbers of the rows that match, in the query's order.

        Raises:
            UnreadableFileError: the file is damaged.
        """
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
        """Return a row.

        Raises:
            UnreadableFileError: the file is damaged.
        """
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
