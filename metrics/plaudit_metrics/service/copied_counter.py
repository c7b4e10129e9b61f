"""A Prometheus counter whose value is kept elsewhere (the run's counters in Redis) and copied here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry


class CopiedCounter(Collector):
    """A family of counters.

    Args:
        name: metric name without ``_total``.
        documentation: help text.
        labels: the labels' names.
        registry: where it is registered.
    """

    def __init__(self, name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = tuple(labels)
        self._values: dict[tuple[str, ...], float] = {}
        registry.register(self)

    def copy(self, values: Mapping[tuple[str, ...], float]) -> None:
        """Copy values, by label values; others keep theirs."""
        self._values.update(values)

    def describe(self) -> Iterator[CounterMetricFamily]:
        """Yield the family without values."""
        yield CounterMetricFamily(self._name, self._documentation, labels=self._labels)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the family as it is scraped."""
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labels)
        for labels, value in sorted(self._values.items()):
            family.add_metric(labels, value)
        yield family
