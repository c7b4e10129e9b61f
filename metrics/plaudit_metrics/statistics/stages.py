"""Split a sample's wall time into its stages, observe arrays in histograms, and reduce the rewards of a validation.

From admission to the moment a sample became terminal (``SAMPLE_STAGES``), and on to the moment the trainer took its
group (``GROUP_STAGES``)::

    admitted ─ rollout_queue ─ taken ─ sandboxes · engine_queue · generation · tools ─ published ─ sample_queue
    ─ first taken
    ─ redelivery ─ taken by the worker that committed ─ limiter · retry · score · commit ─ committed
    ─ group_wait ─ group terminal ─ group_scorer ─ ready ─ ready_queue ─ taken by the trainer

A ``─`` is a stamp of the transport's clock. A ``·`` divides a stretch by durations that one process measured with its
monotonic clock: they are placed in the order shown and cut at the end of the stretch. The rest of the stretch
belongs to ``generation`` before publication and to ``commit`` after it. So the stages add up exactly,
whatever the clocks do. Where a stamp is missing, the stage before it lasts until the next stamp.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Exemplar

from plaudit_metrics.statistics.columns import Floats, Integers, SampleColumns
from plaudit_wire.records import GroupRecord, SampleRecord

SAMPLE_STAGES = (
    *("rollout_queue", "sandboxes", "engine_queue", "generation", "tools"),
    *("sample_queue", "redelivery", "limiter", "retry", "score", "commit"),
)
GROUP_STAGES = ("group_wait", "group_scorer", "ready_queue")
STAGES = SAMPLE_STAGES + GROUP_STAGES
_UNKNOWN = GroupRecord("", "train", 0, "trained", 0, 0, 0.0, 0.0)
"""Stands for a group without a record: it has no points in time."""


def sample_stage_seconds(columns: SampleColumns) -> dict[str, Floats]:
    """Return the seconds of each sample by stage, shape [number of samples]; they add up to committed - admitted."""
    admitted, taken, published, first_taken, score_taken, committed = columns.stamps
    sandbox_s = columns.sandbox_s
    sandboxes, engine_queue, tools, generation = _cut(
        published - taken, sandbox_s, columns.engine_queue_s, columns.tool_s - sandbox_s
    )
    limiter, retry, score, commit = _cut(committed - score_taken, columns.limiter_s, columns.retry_s, columns.call_s)
    return {
        "rollout_queue": taken - admitted,
        "sandboxes": sandboxes,
        "engine_queue": engine_queue,
        "generation": generation,
        "tools": tools,
        "sample_queue": first_taken - published,
        "redelivery": score_taken - first_taken,
        "limiter": limiter,
        "retry": retry,
        "score": score,
        "commit": commit,
    }


def group_stage_seconds(columns: SampleColumns, groups: Mapping[str, GroupRecord]) -> dict[str, Floats]:
    """Return the seconds of each sample in ``GROUP_STAGES``; NaN where its group's record is missing or unstamped."""
    records = [groups.get(group, _UNKNOWN) for group in columns.groups]
    terminal, ready, taken = (
        np.array([getattr(record, point) for record in records], dtype=np.float64)[columns.group]
        for point in ("terminal", "ready", "taken")
    )
    return {
        "group_wait": np.maximum(terminal - columns.committed, 0.0),
        "group_scorer": np.maximum(ready - terminal, 0.0),
        "ready_queue": np.maximum(taken - ready, 0.0),
    }


def stages_of(sample: SampleRecord, group: GroupRecord | None = None) -> dict[str, float]:
    """Return the seconds that one sample spent in each stage; stages of no length are left out."""
    columns = SampleColumns.from_records([sample])
    seconds = sample_stage_seconds(columns)
    if group is not None:
        seconds |= group_stage_seconds(columns, {group.group: group})
    return {stage: float(of_stage[0]) for stage, of_stage in seconds.items() if of_stage[0] > 0}


def _cut(span: Floats, *parts: Floats) -> list[Floats]:
    """Split ``span`` into the given parts in turn and a remainder; a part is cut where it exceeds the span."""
    cut: list[Floats] = []
    for part in parts:
        taken = np.fmin(np.fmax(part, 0.0), span)  # fmax: no part where it is NaN
        cut.append(taken)
        span = span - taken
    return [*cut, span]


BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)
"""Upper bounds in seconds, from a rule's millisecond to the hour of an agent's run."""


class ExemplarSource(Protocol):
    """Name what is behind the values of an array."""

    eligible: NDArray[np.bool_]
    """True where an exemplar may name what is behind the value."""

    def exemplar(self, place: int, value: float) -> Exemplar:
        """Return the exemplar of the value at a place; its timestamp is in seconds since the epoch."""


class BatchHistogram(Collector):
    """Expose a family of histograms with the same buckets, one a combination of label values.

    It observes whole arrays: one numpy call for a batch, not one lock for each value. ``buckets`` are rising upper
    bounds; values above the last count only in ``+Inf``. A bucket has the exemplar of the largest eligible value of its
    newest batch (in OpenMetrics only).
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str],
        registry: CollectorRegistry,
        buckets: Sequence[float] = BUCKETS,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = tuple(labels)
        self._bounds = np.array(buckets, dtype=np.float64)
        self._counts: dict[tuple[str, ...], Integers] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        self._exemplars: dict[tuple[str, ...], dict[int, Exemplar]] = {}
        """Label values → place of a bucket → its exemplar."""
        if not self._labels:  # starts at 0, as in Prometheus's own clients
            self.begin()
        registry.register(self)

    def begin(self, *labels: str) -> None:
        """Show a series at 0, so that its first values are an increase."""
        self._counts.setdefault(labels, np.zeros(len(self._bounds) + 1, dtype=np.int64))
        self._sums.setdefault(labels, 0.0)

    def observe(self, values: Floats, *labels: str, source: ExemplarSource | None = None) -> None:
        """Count every value of the array, except NaN, under the given label values; a negative one as 0."""
        known = np.maximum(values[~np.isnan(values)], 0.0)  # the sum never falls
        if len(known) == 0:
            return
        self.begin(*labels)
        positions = np.searchsorted(self._bounds, known, side="left")
        counts = np.bincount(positions, minlength=len(self._bounds) + 1)
        self._counts[labels] = self._counts[labels] + counts
        self._sums[labels] += float(known.sum())
        if source is not None:
            self.name(values, *labels, source=source)

    def name(self, values: Floats, *labels: str, source: ExemplarSource) -> None:
        """Take exemplars from an array without counting it; a bucket keeps a newer one that it has."""
        places = np.flatnonzero(source.eligible & ~np.isnan(values))
        rising = places[np.argsort(values[places], kind="stable")]
        buckets = np.searchsorted(self._bounds, values[rising], side="left")
        largest = dict(zip(buckets.tolist(), rising.tolist(), strict=True))  # of equal keys the last one stays
        kept = self._exemplars.setdefault(labels, {})
        for bucket, place in largest.items():
            exemplar = source.exemplar(place, float(values[place]))
            if bucket not in kept or _at(kept[bucket]) <= _at(exemplar):
                kept[bucket] = exemplar

    def describe(self) -> Iterator[HistogramMetricFamily]:
        """Yield the family without values: registration must not depend on observations."""
        yield HistogramMetricFamily(self._name, self._documentation, labels=self._labels)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the family as it is scraped, with cumulative buckets."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        for labels, counts in self._counts.items():
            cumulative = np.cumsum(counts).tolist()
            named = self._exemplars.get(labels, {})
            buckets = [
                (bound, count, named[place]) if place in named else (bound, count)
                for place, (bound, count) in enumerate(zip(bounds, cumulative, strict=True))
            ]
            family.add_metric(labels, buckets, sum_value=self._sums[labels])
        yield family


def _at(exemplar: Exemplar) -> float:
    return float(exemplar.timestamp or 0.0)


def best_of(values: Sequence[float], count: int) -> float:
    """Return the expected maximum of ``count`` (at least 1) of at least as many values, drawn without replacement.

    With the values in order, the i-th (from 1) is the maximum of C(i - 1, count - 1) of the C(N, count) draws. For
    values 0 and 1 this is pass@k (Chen et al., 2021, arXiv 2107.03374).
    """
    draws, largest = math.comb(len(values), count), max(map(abs, values)) or 1.0
    # In units of the largest, and shares before products: a reward times C(1023, 511) need not be a float.
    parts = (value / largest * (math.comb(below, count - 1) / draws) for below, value in enumerate(sorted(values)))
    return math.fsum(parts) * largest


def majority(answers: Sequence[tuple[str, float]]) -> float:
    """Return the mean reward of the most frequent of pairs (answer, reward); of equally frequent ones the first."""
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for answer, reward in answers:
        rewards[answer].append(reward)
    most = max(rewards.values(), key=len)
    return mean(most)
