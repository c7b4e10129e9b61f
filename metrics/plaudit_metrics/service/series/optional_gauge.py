"""A Prometheus gauge without a value until it has one: a step before the first one is absent, not 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

GaugeValues = Mapping[tuple[str, ...], float | None]
"""Label values → value; None: the gauge is absent."""


def gauge_family(name: str, documentation: str, labels: Sequence[str], values: GaugeValues) -> GaugeMetricFamily:
    """Return a family of gauges as it is scraped."""
    family = GaugeMetricFamily(name, documentation, labels=labels)
    for of, value in sorted(values.items()):
        if value is not None:
            family.add_metric(of, float(value))
    return family


class OptionalGauge(Collector):
    """Expose a family of gauges: those that have a value."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = tuple(labels)
        self._values: dict[tuple[str, ...], float | None] = {}
        registry.register(self)

    def set(self, value: float | None, *labels: str) -> None:
        """Set one gauge; None removes it."""
        self._values[labels] = value

    def replace(self, values: GaugeValues) -> None:
        """Set all gauges of the family, by label values; remove the others."""
        self._values = dict(values)

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Yield the family without values."""
        yield gauge_family(self._name, self._documentation, self._labels, {})

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the family as it is scraped."""
        yield gauge_family(self._name, self._documentation, self._labels, self._values)
