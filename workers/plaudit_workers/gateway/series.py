"""The Prometheus series of a gateway. Labels are callers (the names of tokens) and fixed values, so they stay few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest

from plaudit_workers.gateway.callers.results import GatewayAnswer, GroupAnswer, SampleAnswer

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class GatewaySeries:
    """Hold the series of one process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = prometheus_client.Counter(
            "plaudit_gateway_requests", "Requests answered", ["caller", "path", "status"], registry=registry
        )
        self.samples = prometheus_client.Counter(
            "plaudit_gateway_samples", "Samples answered, by outcome", ["caller", "outcome"], registry=registry
        )
        self.seconds = Histogram(
            "plaudit_gateway_sample_seconds",
            "Seconds from a sample's submission to its score",
            ["caller"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.awaited = Gauge("plaudit_gateway_awaited", "Samples and groups that requests await", registry=registry)

    def count(self, caller: str, answers: Sequence[GatewayAnswer]) -> None:
        """Count the samples of answers that are sent to a caller."""
        seconds = self.seconds.labels(caller)
        outcomes: Counter[str] = Counter()
        for answer in answers:
            for sample in answer.results if isinstance(answer, GroupAnswer) else [answer]:
                if isinstance(sample, SampleAnswer):
                    outcomes[sample.outcome] += 1
                    seconds.observe(sample.seconds)
        for outcome, number in outcomes.items():
            self.samples.labels(caller, outcome).inc(number)

    def text(self) -> bytes:
        """Return all series in Prometheus's text format."""
        return generate_latest(self.registry)
