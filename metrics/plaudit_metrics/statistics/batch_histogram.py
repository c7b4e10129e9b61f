"""A Prometheus histogram that observes whole arrays: one numpy call for a batch, not one lock for each value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from plaudit_metrics.statistics.columns import Floats, Integers

BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)
"""Upper bounds in seconds, from a rule's millisecond to the hour of an agent's run."""


class BatchHistogram(Collector):
    """A family of histograms with the same buckets, one a combination of label values.

    Args:
        name: metric name with unit, without ``_bucket``.
        documentation: help text.
        labels: label names.
        registry: where it is registered.
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
        if not self._labels:  # starts at 0, as in Prometheus's own clients
            self._counts[()], self._sums[()] = np.zeros(len(self._bounds) + 1, dtype=np.int64), 0.0
        registry.register(self)

    def observe(self, values: Floats, *labels: str) -> None:
        """Count every value of the array, except NaN, under the given label values."""
        known = values[~np.isnan(values)]
        if len(known) == 0:
            return
        positions = np.searchsorted(self._bounds, known, side="left")
        counts = np.bincount(positions, minlength=len(self._bounds) + 1)
        self._counts[labels] = self._counts.get(labels, 0) + counts
        self._sums[labels] = self._sums.get(labels, 0.0) + float(known.sum())

    def describe(self) -> Iterator[HistogramMetricFamily]:
        """Yield the family without values: registration must not depend on observations."""
        yield HistogramMetricFamily(self._name, self._documentation, labels=self._labels)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the family as it is scraped, with cumulative buckets."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        for labels, counts in self._counts.items():
            cumulative = np.cumsum(counts).tolist()
            family.add_metric(labels, list(zip(bounds, cumulative, strict=True)), sum_value=self._sums[labels])
        yield family
