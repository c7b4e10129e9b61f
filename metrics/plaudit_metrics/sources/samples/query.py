"""Conditions on stored samples, evaluated on columns without reading texts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import pyarrow
import pyarrow.compute
from numpy.typing import NDArray

if TYPE_CHECKING:
    from plaudit_metrics.sources.samples.detail import ListedSample

FAILED = "failed"
"""As ``outcome``: every outcome but ``scored``."""
_SCORED = "scored"
_EQUAL = ("data_source", "split", "group", "prompt_id")

SampleOrder = Literal["stored", "lowest", "highest"]
RowNumbers = NDArray[np.int64]


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
        outcome = bounds.get("outcome")
        if self.outcome == FAILED and outcome and outcome[:2] == (_SCORED, _SCORED) and not outcome.nulls:
            return True
        wanted: dict[str, tuple[str | float | None, str | float | None]] = {
            name: (value, value) for name in _EQUAL if (value := getattr(self, name))
        }
        if self.outcome and self.outcome != FAILED:
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
        names += ["outcome"] if self.outcome else []
        by_score = self.order != "stored" or self.lowest is not None or self.highest is not None
        return names + (["score"] if by_score else [])

    def rows(self, table: pyarrow.Table) -> RowNumbers:
        """Return the row numbers of the samples that fulfil the conditions, in the query's order.

        Args:
            table: at least ``columns()`` of a file; a column that an old file lacks accepts nothing.
        """
        mask = np.ones(len(table), dtype=np.bool_)
        for name in _EQUAL:
            if value := getattr(self, name):
                mask &= _equals(table, name, value)
        if self.outcome:
            scored = _equals(table, "outcome", _SCORED if self.outcome == FAILED else self.outcome)
            mask &= ~scored if self.outcome == FAILED else scored
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
