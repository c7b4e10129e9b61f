"""Declare and count the Prometheus series of the tools that conversations call."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from prometheus_client import CollectorRegistry, Counter

from plaudit_metrics.alerting.thresholds import LEAST_SAMPLES, RECENT_SAMPLES
from plaudit_metrics.service.series.optional_gauge import OptionalGauge
from plaudit_metrics.service.series.recent_mean import RecentMean
from plaudit_metrics.statistics.batch_histogram import BatchHistogram
from plaudit_metrics.statistics.turns import ToolCalls, tool_name

_FAILED = ("error", "timeout", "killed")
"""A refused call is the policy's mistake or a limit of the job: the tool was never run."""


class ToolSeries:
    """Count the calls of tools. Names beyond ``MOST_TOOLS`` count as ``unknown``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.call_seconds = BatchHistogram(
            "plaudit_tool_call_seconds", "Seconds of a tool's calls, refused ones excluded", ["tool"], registry
        )
        self.calls = Counter(
            "plaudit_tool_calls", "Calls of a tool, by how they ended", ["tool", "outcome"], registry=registry
        )
        self._recent_failed = OptionalGauge(
            "plaudit_tool_recent_failed_ratio",
            "Share of a tool's newest calls that raised, timed out or lost their process",
            ["tool"],
            registry,
        )
        self._failed: dict[str, RecentMean] = {}

    def count(self, tools: Mapping[str, ToolCalls]) -> None:
        """Count the calls of a batch of samples."""
        for given, calls in tools.items():
            name = tool_name(given, self._failed)
            self.call_seconds.observe(np.array(calls.run_s), name)
            for outcome, number in calls.outcomes.items():
                self.calls.labels(name, outcome).inc(number)

    def remember(self, tools: Mapping[str, ToolCalls]) -> None:
        """Update the shares among the newest calls; call it before ``count``."""
        for given, calls in tools.items():
            name = tool_name(given, self._failed)
            failed = self._failed.setdefault(name, RecentMean(RECENT_SAMPLES, LEAST_SAMPLES))
            failed.add(float(sum(calls.outcomes[outcome] for outcome in _FAILED)), len(calls.run_s))
            self._recent_failed.set(failed.mean, name)
