"""Choose the stored samples that a report contains, since a file can hold only some of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

from plaudit_metrics.sources.samples.detail import detail, listed
from plaudit_metrics.sources.samples.few import few_samples
from plaudit_metrics.sources.samples.files import surviving_files

_STEPS = 10
_CHARACTERS = 4000
"""Of each text."""


def report_samples(folder: Path) -> dict[str, Any]:
    """Return the API's responses about some samples of the newest ten steps; an empty mapping where none are stored.

    Of each step these are the first 16, and the first four that have no score.

    Raises:
        UnreadableFileError: a file is damaged.
    """
    files = surviving_files(folder)
    rows = [row for step in sorted(files, reverse=True)[:_STEPS] for row in few_samples(files[step])]
    if not rows:
        return {}
    page = {"samples": [listed(row) for row in rows], "first_step": min(files), "last_step": max(files)}
    details = {
        f"samples/{row['step']}/{quote(row['group'], safe='')}/{row['index']}": detail(row, _CHARACTERS) for row in rows
    }
    return {"samples": page, **details}
