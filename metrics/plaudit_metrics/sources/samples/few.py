"""Choose a few stored samples of a step, where only some can be kept."""

from __future__ import annotations

from pathlib import Path

from plaudit_metrics.sources.samples.query import FAILED, SampleQuery
from plaudit_metrics.sources.samples.sample_file import Row, SampleFile

_FIRST = 16
"""The first samples of a step, which are those of whole groups."""
_FAILED = 4


def few_samples(path: Path) -> list[Row]:
    """Return the first 16 samples of a file, and the first four that have no score.

    Raises:
        UnreadableFileError: the file is damaged.
    """
    with SampleFile(path) as file:
        first = file.find(SampleQuery())[:_FIRST].tolist()
        failed = file.find(SampleQuery(outcome=FAILED))[:_FAILED].tolist()
        return [file.read(row) for row in dict.fromkeys(first + failed)]
