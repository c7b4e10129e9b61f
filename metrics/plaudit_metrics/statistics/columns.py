"""Turn a step's samples into arrays: one column a field, so that every figure is one numpy call.

``ColumnCollector`` takes the samples one by one as they come and packs each into one row of numbers, so that nothing
is left to convert when the step closes. Read by ``steps``, ``stages`` and ``waits``. NaN means "did not happen".
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from plaudit_metrics.statistics.failures import Failure, FailureCounts
from plaudit_metrics.statistics.rows import PackedRows
from plaudit_metrics.statistics.turns import TurnCollector, TurnColumns
from plaudit_wire.records import OUTCOMES, GenerationRecord, SampleRecord, ScorerRecord

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

MOST_EXTRAS = 16
"""Numeric extras of one scorer that are figures of a step; further ones are not."""
_EXTRA_CHARACTERS = 64

_OUTCOME_CODES = {outcome: float(code) for code, outcome in enumerate(OUTCOMES)}
_NAN = math.nan
_NEVER_GENERATED = GenerationRecord(
    worker="",
    generate_s=_NAN,
    prompt_tokens=0,
    response_tokens=0,
    version_min=0,
    version_max=0,
    tool_s=_NAN,
    engine_queue_s=_NAN,
)


class ExtraFigures(NamedTuple):
    """Hold the figures of a numeric extra of a scorer."""

    mean: float
    min: float
    max: float


@dataclass(frozen=True)
class ScorerColumns:
    """Hold one scorer's part in a step; arrays of shape [number of samples that it was asked about]."""

    value: Floats
    """NaN where it gave none."""
    limiter_s: Floats
    held_s: Floats
    """The part of ``limiter_s`` in which the endpoint had asked for a pause."""
    retry_s: Floats
    call_s: Floats
    wait_s: Floats
    """Seconds waiting for a free scorer process."""
    outcome: Integers
    """Index into ``OUTCOMES``."""
    extras: dict[str, ExtraFigures]
    """Name of a numeric extra → its figures over the samples that have it."""


@dataclass(frozen=True)
class SampleColumns:
    """Hold a step's samples as arrays of shape [number of samples]; seconds, points in time since the epoch."""

    group: Integers
    """Index into ``groups``."""
    groups: tuple[str, ...]
    """Ids of the groups that the samples belong to."""
    admitted: Floats
    taken: Floats
    published: Floats
    score_first_taken: Floats
    score_taken: Floats
    committed: Floats
    generated: NDArray[np.bool_]
    """True where there is a generation record; elsewhere the generation's columns are NaN or 0."""
    generate_s: Floats
    tool_s: Floats
    engine_queue_s: Floats
    num_preempted: Integers
    """-1 where the engine does not report it."""
    prompt_tokens: Integers
    response_tokens: Integers
    version_min: Integers
    truncated: NDArray[np.bool_]
    """True where the response ended at its token limit."""
    limiter_s: Floats
    retry_s: Floats
    call_s: Floats
    value: Floats
    """NaN where the sample has no score."""
    outcome: Integers
    """Index into ``OUTCOMES``."""
    deliveries: Integers
    scorers: dict[str, ScorerColumns]
    failures: tuple[Failure, ...]
    """The failures of the scorers, the most frequent first."""
    turns: TurnColumns
    """The conversations among them."""

    def __len__(self) -> int:
        return len(self.group)

    @cached_property
    def stamps(self) -> Floats:
        """Return the times at which each sample passed from stage to stage, in order; do not write to it.

        Shape [6, number of samples], seconds since the epoch: admitted, taken, published, first taken, taken by the
        worker that committed, committed. Never falls along the first axis; a missing point equals the next one.
        """
        points = np.stack(
            [self.admitted, self.taken, self.published, self.score_first_taken, self.score_taken, self.committed]
        )
        for later in range(len(points) - 1, 0, -1):
            missing = np.isnan(points[later - 1])
            points[later - 1][missing] = points[later][missing]
        if np.isnan(points[-1]).any():
            points = np.where(np.isnan(points), np.nanmax(points, axis=0, initial=-np.inf), points)
        latest = np.maximum(points[-1], points[0])
        for earlier in range(len(points) - 1):
            np.maximum(points[earlier + 1], points[earlier], out=points[earlier + 1])
        ordered: Floats = np.minimum(points, latest, out=points)
        return ordered

    @classmethod
    def from_records(cls, samples: Iterable[SampleRecord]) -> SampleColumns:
        """Turn records into arrays, in their order."""
        collector = ColumnCollector()
        for sample in samples:
            collector.add(sample)
        return collector.columns()


class ColumnCollector:
    """Collect samples into columns, one at a time: about two microseconds each, nothing but views at the end."""

    def __init__(self) -> None:
        self._groups: dict[str, int] = {}
        self._rows = PackedRows(21)
        self._scorers: dict[str, _ScorerCollector] = {}
        self._turns = TurnCollector()
        self._failures = FailureCounts()

    def add(self, sample: SampleRecord) -> None:
        """Add one terminal sample."""
        stamps, scoring = sample.stamps, sample.scoring
        generation = sample.generation or _NEVER_GENERATED
        self._rows.append(
            self._groups.setdefault(sample.group, len(self._groups)),
            stamps.admitted,
            _NAN if stamps.taken is None else stamps.taken,
            _NAN if stamps.published is None else stamps.published,
            _NAN if stamps.score_first_taken is None else stamps.score_first_taken,
            _NAN if stamps.score_taken is None else stamps.score_taken,
            _NAN if stamps.committed is None else stamps.committed,
            sample.generation is not None,
            generation.generate_s,
            generation.tool_s,
            generation.engine_queue_s,
            generation.num_preempted,
            generation.prompt_tokens,
            generation.response_tokens,
            generation.version_min,
            scoring.limiter_s,
            scoring.retry_s,
            scoring.call_s,
            _NAN if scoring.value is None else scoring.value,
            _OUTCOME_CODES[scoring.outcome] + len(OUTCOMES) * sample.deliveries,
            generation.finish_reason == "length",
        )
        if generation.turns:
            self._turns.add(generation.turns)
        failed = not scoring.is_scored
        for name, record in scoring.scorers.items():
            of_scorer = self._scorers.get(name)
            if of_scorer is None:
                of_scorer = self._scorers[name] = _ScorerCollector()
            of_scorer.add(record)
            failed = failed or not record.is_scored
        if failed:
            self._failures.add(scoring)

    def columns(self) -> SampleColumns:
        """Return the columns of all samples that were added so far."""
        rows = self._rows.columns()
        integers = {name: rows[place].astype(np.int64) for name, place in _INTEGERS.items()}
        deliveries, outcome = np.divmod(rows[19].astype(np.int64), len(OUTCOMES))
        return SampleColumns(
            groups=tuple(self._groups),
            generated=rows[7] != 0,
            truncated=rows[20] != 0,
            outcome=outcome,
            deliveries=deliveries,
            scorers={name: scorer.columns() for name, scorer in self._scorers.items()},
            failures=tuple(self._failures.failures()),
            turns=self._turns.columns(),
            **integers,
            **{name: rows[place] for name, place in _FLOATS.items()},
        )


_INTEGERS = {
    "group": 0,
    "num_preempted": 11,
    "prompt_tokens": 12,
    "response_tokens": 13,
    "version_min": 14,
}
_FLOATS = {
    "admitted": 1,
    "taken": 2,
    "published": 3,
    "score_first_taken": 4,
    "score_taken": 5,
    "committed": 6,
    "generate_s": 8,
    "tool_s": 9,
    "engine_queue_s": 10,
    "limiter_s": 15,
    "retry_s": 16,
    "call_s": 17,
    "value": 18,
}
"""Column → its place in a row of ``ColumnCollector``; place 7 is ``generated``, 19 holds outcome
and deliveries, 20 is ``truncated``."""


class _ScorerCollector:
    """Collect the records of one scorer."""

    def __init__(self) -> None:
        self._rows = PackedRows(7)
        self._extras: dict[str, tuple[float, int, float, float]] = {}
        """Name → sum, count, minimum and maximum."""

    def add(self, record: ScorerRecord) -> None:
        self._rows.append(
            _NAN if record.value is None else record.value,
            record.limiter_s,
            record.held_s,
            record.retry_s,
            record.call_s,
            record.wait_s,
            _OUTCOME_CODES[record.outcome],
        )
        if record.extra:
            self._add_extras(record.extra)

    def _add_extras(self, extra: dict[str, float | str]) -> None:
        for name, value in extra.items():
            if isinstance(value, str) or not math.isfinite(value) or len(name) > _EXTRA_CHARACTERS:
                continue
            known = self._extras.get(name)
            if known is None and len(self._extras) >= MOST_EXTRAS:
                continue
            total, count, least, greatest = known or (0.0, 0, value, value)
            self._extras[name] = (total + value, count + 1, min(least, value), max(greatest, value))

    def columns(self) -> ScorerColumns:
        value, limiter_s, held_s, retry_s, call_s, wait_s, outcome = self._rows.columns()
        extras = {
            name: ExtraFigures(total / count, least, greatest)
            for name, (total, count, least, greatest) in sorted(self._extras.items())
        }
        return ScorerColumns(value, limiter_s, held_s, retry_s, call_s, wait_s, outcome.astype(np.int64), extras)
