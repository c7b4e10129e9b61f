"""Every Prometheus series of the operator, declared once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from plaudit_operator.cache import Cache
from plaudit_operator.gpu_time import gpu_seconds
from plaudit_operator.runtime.kinds import OWNERS, Kind

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class OperatorSeries:
    """Hold the operator's series.

    Args:
        cache: source of the series of jobs, read at each scrape.
        leads: returns True while this operator is the leader.
        silences: returns the seconds since the last event of each watch, by kind.
    """

    def __init__(
        self,
        cache: Cache,
        queue_depth: Callable[[], int],
        leads: Callable[[], bool],
        silences: Callable[[], Mapping[str, float]],
    ) -> None:
        self.registry = CollectorRegistry()
        self.reconcile_seconds = Histogram(
            "plaudit_operator_reconcile_seconds",
            "Time of one reconciliation of one RLJob",
            ["result"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.registry.register(_State(cache, queue_depth, leads, silences))


class _State(Collector):
    """Compute gauges at each scrape."""

    def __init__(
        self,
        cache: Cache,
        queue_depth: Callable[[], int],
        leads: Callable[[], bool],
        silences: Callable[[], Mapping[str, float]],
    ) -> None:
        self._cache = cache
        self._queue_depth = queue_depth
        self._leads = leads
        self._silences = silences

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges."""
        yield GaugeMetricFamily("plaudit_operator_queue_depth", "RLJobs that wait", value=self._queue_depth())
        yield GaugeMetricFamily("plaudit_operator_leader", "1 on the leader, 0 on standbys", value=int(self._leads()))
        ages = GaugeMetricFamily(
            "plaudit_operator_watch_last_event_age_seconds", "Time since the last event of the watch", labels=["kind"]
        )
        for kind, age_s in self._silences().items():
            ages.add_metric([kind], age_s)
        yield ages
        for owner in OWNERS:
            yield from self._states(owner)
        yield from self._costs()

    def _states(self, kind: Kind) -> Iterator[Metric]:
        prefix = f"plaudit_{kind.kind.lower()}"
        info = GaugeMetricFamily(f"{prefix}_info", f"{kind.kind}s", labels=["namespace", "name", "run", "phase"])
        conditions = GaugeMetricFamily(
            f"{prefix}_condition", f"Conditions of {kind.kind}s", labels=["namespace", "name", "type", "status"]
        )
        for job in self._cache.jobs(kind):
            metadata, status = job["metadata"], job.get("status") or {}
            key = [metadata["namespace"], metadata["name"]]
            info.add_metric([*key, str(status.get("run", "")), str(status.get("phase", ""))], 1)
            for condition in status.get("conditions") or []:
                conditions.add_metric([*key, condition["type"], condition["status"]], 1)
        yield info
        yield conditions

    def _costs(self) -> Iterator[Metric]:
        """Yield GPUs and GPU time of each job and role, and what waiting for rewards cost."""
        labels = ["namespace", "name", "run"]
        gpus = GaugeMetricFamily("plaudit_rljob_gpus", "GPUs that pods hold", labels=[*labels, "role"])
        spent = CounterMetricFamily("plaudit_rljob_gpu_seconds", "GPU time", labels=[*labels, "role"])
        waited = CounterMetricFamily(
            "plaudit_rljob_exposed_reward_gpu_seconds", "GPU time that trainers waited for rewards", labels=labels
        )
        for job in (job for kind in OWNERS for job in self._cache.jobs(kind)):
            metadata, status = job["metadata"], job.get("status") or {}
            cost = status.get("cost")
            if not cost:
                continue
            key = [metadata["namespace"], metadata["name"], str(status.get("run", ""))]
            for role in cost["roles"]:
                gpus.add_metric([*key, role["name"]], role["gpus"])
            for name, seconds in gpu_seconds(cost, time.time()).items():
                spent.add_metric([*key, name], seconds)
            waited.add_metric(key, cost["exposedRewardGpuSeconds"])
        yield from (gpus, spent, waited)
