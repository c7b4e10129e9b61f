"""Search a run's stored samples page by page. A page costs a bounded amount of work, however many samples there are.

A search walks the files of the steps from the newest to the oldest. Files whose footer excludes the query are skipped;
the footers' bounds are remembered, since a file never changes. A page ends when it is full, after ``MOST_FILES`` opened
files, or after ``MOST_BYTES`` of decompressed texts; it then names the place at which the next page begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from plaudit_metrics.sources.samples.query import Bounds, SampleQuery
from plaudit_metrics.sources.samples.sample_file import Row, SampleFile

MOST_FILES = 128
MOST_BYTES = 32 << 20


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
        """Return the next samples of a search, at most ``most``.

        Args:
            files: step → its file.
            start: the place at which the page begins; None is the newest step.

        Raises:
            UnreadableFileError: a file is damaged.
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
