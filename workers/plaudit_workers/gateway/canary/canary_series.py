"""The comparison of two services as Prometheus series, and in the service's description."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_DIFFERENCES = (-10, -1, -0.5, -0.25, -0.1, -0.01, 0, 0.01, 0.1, 0.25, 0.5, 1, 10)
_EQUAL_WITHIN = 1e-6


class CanarySeries:
    """Hold the figures of one process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._samples = prometheus_client.Counter(
            "plaudit_gateway_canary_samples",
            "Samples that a canary scored as well: equal, different, only_here, only_there, neither (has a score); "
            "unavailable, left_out",
            ["result", "version"],
            registry=registry,
        )
        self._difference = Histogram(
            "plaudit_gateway_canary_difference",
            "Score of the canary minus score of the service",
            buckets=_DIFFERENCES,
            registry=registry,
        )
        self._seconds = Histogram(
            "plaudit_gateway_canary_seconds", "Seconds of a sample in the canary", buckets=_SECONDS, registry=registry
        )
        self._results: Counter[str] = Counter()
        self._sum = self._sum_of_seconds = 0.0
        self._versions: dict[str, None] = {}

    def count(self, result: str, version: str) -> None:
        """Count a sample."""
        self._samples.labels(result, version).inc()
        self._results[result] += 1

    def compare(self, here: float | None, there: float | None, seconds: float, version: str) -> None:
        """Count a sample that both have scored; None means that the service has no score."""
        self._versions[version] = None
        self._seconds.observe(seconds)
        self._sum_of_seconds += seconds
        self.count(_result(here, there), version)
        if here is not None and there is not None:
            self._difference.observe(there - here)
            self._sum += there - here

    def description(self) -> dict[str, Any]:
        """Return the comparison so far, of this process."""
        both = self._results["equal"] + self._results["different"]
        scored = both + sum(self._results[name] for name in ("only_here", "only_there", "neither"))
        return {
            "samples": dict(self._results),
            "agreement": self._results["equal"] / both if both else None,
            "mean_difference": self._sum / both if both else None,
            "mean_seconds": self._sum_of_seconds / scored if scored else None,
            "versions": list(self._versions),
        }


def _result(here: float | None, there: float | None) -> str:
    if here is None or there is None:
        return "neither" if here is there else "only_there" if here is None else "only_here"
    return "equal" if math.isclose(here, there, rel_tol=_EQUAL_WITHIN, abs_tol=_EQUAL_WITHIN) else "different"
