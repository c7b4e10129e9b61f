"""A Prometheus counter whose value is kept elsewhere (the run's counters in Redis) and copied here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry


class CopiedCounter(Collector):
    """Expose a family of counters; ``name`` is without ``_total``."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = tuple(labels)
        self._values: dict[tuple[str, ...], float] = {}
        self._last: dict[tuple[str, ...], float] = {}
        self._ahead: dict[tuple[str, ...], float] = {}
        """What Redis has lost since this process started."""
        registry.register(self)

    def copy(self, values: Mapping[tuple[str, ...], float]) -> None:
        """Copy values, by label values; others keep theirs.

        A value below the last one is a Redis that came back with an older state. It is not shown, because Prometheus
        would take it for a counter that began at 0 again, and count everything a second time.
        """
        for labels, value in values.items():
            lost = self._last.get(labels, 0.0) - value
            if lost > 0:
                self._ahead[labels] = self._ahead.get(labels, 0.0) + lost
            self._last[labels] = value
            self._values[labels] = value + self._ahead.get(labels, 0.0)

    def describe(self) -> Iterator[CounterMetricFamily]:
        """Yield the family without values."""
        yield CounterMetricFamily(self._name, self._documentation, labels=self._labels)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the family as it is scraped."""
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labels)
        for labels, value in sorted(self._values.items()):
            family.add_metric(labels, value)
        yield family
