"""Choose the rows of a measured difficulty: ``data.train.passRate``. Called by ``dataset``.

The choice depends on the file and the job alone, so a resumed run has the same prompts at the same positions.
"""

from __future__ import annotations

from pathlib import Path

from plaudit_wire.errors import RefusedError
from plaudit_workers.job.data_row import extra_info_of
from plaudit_workers.job.spec.data import PassRateSpec
from plaudit_workers.training.data.rows import Rows


def within_pass_rate(path: Path, rows: Rows, section: PassRateSpec) -> list[bool]:
    """Return for each row whether its pass rate is within the bounds, which count as within.

    Raises:
        RefusedError: a row has no such number.
    """
    return [section.min <= _pass_rate(path, number, rows, section.field) <= section.max for number in range(len(rows))]


def _pass_rate(path: Path, number: int, rows: Rows, field: str) -> float:
    value = extra_info_of(rows[number].get("extra_info")).get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise RefusedError(
            f"data file {path}, row {number + 1}: extra_info[{field!r}] is {value!r}; data.train.passRate requires a "
            "number from 0 to 1 in every row. Write it, name another field, or remove passRate"
        )
    return float(value)
