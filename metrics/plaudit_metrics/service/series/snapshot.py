"""Declare and show the Prometheus series of streams, workers, judges and Redis, as the newest snapshot has them.

While Redis does not respond they are absent: an old depth or an old list of workers would look like health.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Gauge

from plaudit_metrics.alerting.thresholds import LEAST_SAMPLES, RECENT_SAMPLES
from plaudit_metrics.service.series.copied_counter import CopiedCounter
from plaudit_metrics.service.series.engine import EngineSeries
from plaudit_metrics.service.series.optional_gauge import OptionalGauge
from plaudit_metrics.service.series.recent_mean import RecentMean
from plaudit_metrics.sources.run_snapshot import WORKER_STATES, RunSnapshot

_FAILED_STATUSES = ("timeout", "unreachable", "429")


class SnapshotSeries:
    """Show the series of a run's streams, workers, judges and Redis.

    Args:
        roles: the roles of the job's processes; a role without a live process is 0, not absent.
    """

    def __init__(self, registry: CollectorRegistry, roles: tuple[str, ...] = ()) -> None:
        self._roles = roles
        self._gauges: list[OptionalGauge] = []
        self._judge_requests: dict[str, tuple[int, int]] | None = None
        """Judge → failed and all requests, at the last snapshot."""
        self._judge_recent: dict[str, RecentMean] = {}
        self._declare_streams(registry)
        self._declare_workers(registry)
        self._declare_judges(registry)
        self._declare_redis(registry)

    def _gauge(self, registry: CollectorRegistry, name: str, documentation: str, *labels: str) -> OptionalGauge:
        gauge = OptionalGauge(name, documentation, labels, registry)
        self._gauges.append(gauge)
        return gauge

    def _declare_streams(self, registry: CollectorRegistry) -> None:
        self._undelivered = self._gauge(
            registry, "plaudit_stream_undelivered", "Entries that no consumer has read", "stream"
        )
        self._in_flight = self._gauge(
            registry, "plaudit_stream_in_flight", "Entries that a consumer works on", "stream"
        )
        self._oldest_undelivered = self._gauge(
            registry,
            "plaudit_stream_oldest_undelivered_seconds",
            "Age of the oldest entry that no consumer has read; 0 when there is none",
            "stream",
        )
        self._oldest_in_flight = self._gauge(
            registry,
            "plaudit_stream_oldest_in_flight_seconds",
            "Age of the oldest entry that a consumer works on; 0 when there is none",
            "stream",
        )
        self._redeliveries = CopiedCounter(
            "plaudit_redeliveries", "Entries taken over from a lost worker", ["stream"], registry
        )
        self._duplicates = CopiedCounter(
            "plaudit_duplicates", "Publications and commits refused as done before", ["stream"], registry
        )
        self._dead_letters = CopiedCounter("plaudit_dead_letters", "Poison records", ["stream"], registry)

    def _declare_workers(self, registry: CollectorRegistry) -> None:
        self._workers = self._gauge(registry, "plaudit_workers", "Live processes", "role", "state")
        self._scorer_in_flight = self._gauge(
            registry, "plaudit_scorer_in_flight", "Samples that a scorer works on", "scorer"
        )
        self._scorer_oldest = self._gauge(
            registry,
            "plaudit_scorer_oldest_in_flight_seconds",
            "Age of the oldest call of a scorer that has not ended; 0 when there is none",
            "scorer",
        )
        self._engines = EngineSeries(partial(self._gauge, registry))
        self._version = self._gauge(registry, "plaudit_policy_version", "Announced policy version")
        self._version_lag = self._gauge(
            registry, "plaudit_policy_version_lag", "Policy versions by which the slowest ready rollout is behind"
        )

    def _declare_judges(self, registry: CollectorRegistry) -> None:
        self._requests = CopiedCounter(
            "plaudit_judge_requests", "Requests to a judge, by how they ended", ["judge", "status"], registry
        )
        self._tokens = CopiedCounter(
            "plaudit_judge_tokens", "Tokens that a judge read and wrote", ["judge", "kind"], registry
        )
        self._cache_reads = CopiedCounter(
            "plaudit_score_cache_reads",
            "Samples looked up in a scorer's cache: hit, or miss and then scored",
            ["scorer", "result"],
            registry,
        )
        self._circuit_open = self._gauge(
            registry,
            "plaudit_judge_circuit_open",
            "1 while a reward worker's circuit breaker for the judge is open",
            "judge",
        )
        self._judge_failed = self._gauge(
            registry,
            "plaudit_judge_recent_failed_ratio",
            "Share of a judge's newest requests that ended with 429, 5xx, a timeout or no connection",
            "judge",
        )

    def _declare_redis(self, registry: CollectorRegistry) -> None:
        self._up = Gauge("plaudit_redis_up", "1 while Redis responds", registry=registry)
        self._last_seen = OptionalGauge(
            "plaudit_redis_last_seen_timestamp_seconds", "When Redis responded last", [], registry
        )
        self._memory = self._gauge(registry, "plaudit_redis_memory_bytes", "Memory that Redis uses")
        self._memory_limit = self._gauge(
            registry, "plaudit_redis_memory_limit_bytes", "Memory that Redis may use; 0 = no limit"
        )
        self._aof_ok = self._gauge(registry, "plaudit_redis_aof_ok", "1 while Redis writes its append-only file")

    def show_redis_down(self) -> None:
        """Show that Redis does not respond, and nothing that was read from it earlier."""
        self._up.set(0)
        for gauge in self._gauges:
            gauge.clear()

    def show(self, seen: RunSnapshot) -> None:
        """Show streams, workers, judges and Redis as the snapshot has them."""
        self._up.set(1)
        self._last_seen.set(seen.time)
        self._show_streams(seen)
        self._show_workers(seen)
        self._show_judges(seen)
        self._memory.set(seen.memory_bytes)
        self._memory_limit.set(seen.memory_limit_bytes)
        self._aof_ok.set(seen.aof_ok)

    def _show_streams(self, seen: RunSnapshot) -> None:
        for stream, depth in seen.streams.items():
            self._undelivered.set(depth.undelivered, stream)
            self._in_flight.set(depth.in_flight, stream)
            self._oldest_undelivered.set(depth.oldest_undelivered_s, stream)
            self._oldest_in_flight.set(depth.oldest_in_flight_s, stream)
        none = dict.fromkeys(seen.streams, 0)  # counted from 0 on, so that the first one shows as an increase
        self._redeliveries.copy(_one_label(none | seen.redeliveries))
        self._duplicates.copy(_one_label(none | seen.duplicates))
        self._dead_letters.copy(_one_label(none | seen.dead_letters))

    def _show_workers(self, seen: RunSnapshot) -> None:
        roles = {*self._roles, *(role for role, _ in seen.workers)}
        self._workers.replace(
            {(role, state): seen.workers.get((role, state), 0) for role in roles for state in WORKER_STATES}
        )
        self._scorer_in_flight.replace({(name,): work.in_flight for name, work in seen.scorers.items()})
        self._scorer_oldest.replace({(name,): work.oldest_s for name, work in seen.scorers.items()})
        self._engines.show(seen.engines)
        self._version.set(seen.policy_version)
        self._version_lag.set(None if seen.policy_version is None else seen.policy_version_lag)

    def _show_judges(self, seen: RunSnapshot) -> None:
        self._requests.copy(seen.judge_requests)
        self._tokens.copy(seen.judge_tokens)
        self._cache_reads.copy(seen.cache_reads)
        self._circuit_open.replace({(judge,): is_open for judge, is_open in seen.circuits_open.items()})
        self._show_newest_requests(seen)

    def _show_newest_requests(self, seen: RunSnapshot) -> None:
        """Show the share that failed of a judge's newest requests; those before this process started are unknown."""
        counts: dict[str, tuple[int, int]] = {}
        for (judge, status), count in seen.judge_requests.items():
            if status == _CACHED:
                continue
            failed, total = counts.get(judge, (0, 0))
            counts[judge] = failed + count * _is_failure(status), total + count
        before = counts if self._judge_requests is None else self._judge_requests
        self._judge_requests = counts
        for judge, (failed, total) in counts.items():
            failed_before, total_before = before.get(judge, (0, 0))
            recent = self._judge_recent.setdefault(judge, RecentMean(RECENT_SAMPLES, LEAST_SAMPLES))
            recent.add(max(failed - failed_before, 0), total - total_before)
            self._judge_failed.set(recent.mean, judge)


_CACHED = "cached"
"""The status of samples that needed no request, because an equal one was scored before."""


def _is_failure(status: str) -> bool:
    return status in _FAILED_STATUSES or (len(status) == 3 and status.startswith("5"))


def _one_label(values: Mapping[str, int]) -> dict[tuple[str, ...], float]:
    return {(label,): value for label, value in values.items()}
