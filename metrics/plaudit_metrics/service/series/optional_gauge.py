"""A Prometheus gauge without a value until it has one: a step before the first one is absent, not 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry


class OptionalGauge(Collector):
    """Expose a family of gauges: those that have a value."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = tuple(labels)
        self._values: dict[tuple[str, ...], float] = {}
        registry.register(self)

    def set(self, value: float | None, *labels: str) -> None:
        """Set one gauge; None removes it."""
        if value is None:
            self._values.pop(labels, None)
        else:
            self._values[labels] = float(value)

    def replace(self, values: Mapping[tuple[str, ...], float]) -> None:
        """Set all gauges of the family, by label values; remove the others."""
        self._values = dict(values)

    def clear(self) -> None:
        """Remove all values."""
        self._values = {}

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Yield the family without values."""
        yield GaugeMetricFamily(self._name, self._documentation, labels=self._labels)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the family as it is scraped."""
        family = GaugeMetricFamily(self._name, self._documentation, labels=self._labels)
        for labels, value in sorted(self._values.items()):
            family.add_metric(labels, value)
        yield family
