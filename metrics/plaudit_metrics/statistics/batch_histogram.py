"""Observe whole arrays in a Prometheus histogram: one numpy call for a batch, not one lock for each value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Exemplar

from plaudit_metrics.statistics.columns import Floats, Integers

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

    A bucket has the exemplar of the largest eligible value of its newest batch (in OpenMetrics only).

    Args:
        name: metric name with unit, without ``_bucket``.
        buckets: rising upper bounds; values above the last count only in ``+Inf``.
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
            self._counts[()], self._sums[()] = np.zeros(len(self._bounds) + 1, dtype=np.int64), 0.0
        registry.register(self)

    def observe(self, values: Floats, *labels: str, source: ExemplarSource | None = None) -> None:
        """Count every value of the array, except NaN, under the given label values."""
        known = values[~np.isnan(values)]
        if len(known) == 0:
            return
        positions = np.searchsorted(self._bounds, known, side="left")
        counts = np.bincount(positions, minlength=len(self._bounds) + 1)
        self._counts[labels] = self._counts.get(labels, 0) + counts
        self._sums[labels] = self._sums.get(labels, 0.0) + float(known.sum())
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
