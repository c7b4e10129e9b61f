"""Compute the Prometheus series of streams, workers, judges and Redis at each scrape, from the newest snapshot.

While Redis does not respond they are absent: an old depth or an old list of workers would look like health.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from plaudit_metrics.monitoring.rules import IDLE_S
from plaudit_metrics.service.series.collectors import (
    CopiedCounts,
    Labelled,
    RecentMean,
    RecentWindow,
    counter_family,
    engine_gauges,
    gauge_family,
)
from plaudit_metrics.sources.snapshot import WORKER_STATES, RunSnapshot

_FAILED_STATUSES = ("timeout", "unreachable", "429")
_STATUSES = ("200", *_FAILED_STATUSES, "500", "502", "503", "504")
"""Counted from 0 on for each judge, so that the first failures show as an increase."""
_CACHED = "cached"
"""The status of samples that needed no request, because an equal one was scored before."""
_GAUGES: tuple[tuple[str, str, tuple[str, ...], Callable[[RunSnapshot], Labelled]], ...] = (
    (
        "plaudit_stream_undelivered",
        "Entries that no consumer has read",
        ("stream",),
        lambda seen: {(name,): depth.undelivered for name, depth in seen.streams.items()},
    ),
    (
        "plaudit_stream_in_flight",
        "Entries that a consumer works on",
        ("stream",),
        lambda seen: {(name,): depth.in_flight for name, depth in seen.streams.items()},
    ),
    (
        "plaudit_stream_oldest_undelivered_seconds",
        "Age of the oldest entry that no consumer has read; 0 when there is none",
        ("stream",),
        lambda seen: {(name,): depth.oldest_undelivered_s for name, depth in seen.streams.items()},
    ),
    (
        "plaudit_stream_oldest_in_flight_seconds",
        "Age of the oldest entry that a consumer works on; 0 when there is none",
        ("stream",),
        lambda seen: {(name,): depth.oldest_in_flight_s for name, depth in seen.streams.items()},
    ),
    (
        "plaudit_scorer_in_flight",
        "Samples that a scorer works on",
        ("scorer",),
        lambda seen: {(name,): work.in_flight for name, work in seen.scorers.items()},
    ),
    (
        "plaudit_scorer_oldest_in_flight_seconds",
        "Age of the oldest call of a scorer that has not ended; 0 when there is none",
        ("scorer",),
        lambda seen: {(name,): work.oldest_s for name, work in seen.scorers.items()},
    ),
    (
        "plaudit_sandboxes",
        "Machines of samples; waiting: samples without a place for theirs; left: to their tests, or until their group "
        "ends",
        ("state",),
        lambda seen: {} if seen.sandboxes is None else {(state,): n for state, n in seen.sandboxes.states.items()},
    ),
    (
        "plaudit_sandbox_oldest_wait_seconds",
        "Age of the oldest wait of a sample for a place for its machine; 0 when there is none",
        (),
        lambda seen: {(): None if seen.sandboxes is None else seen.sandboxes.oldest_wait_s},
    ),
    (
        "plaudit_trainer_validating",
        "1 while the trainer waits for validation samples",
        (),
        lambda seen: {(): seen.is_validating if seen.trainer_started else None},
    ),
    ("plaudit_policy_version", "Announced policy version", (), lambda seen: {(): seen.policy_version}),
    (
        "plaudit_policy_version_lag",
        "Policy versions by which the slowest ready rollout is behind",
        (),
        lambda seen: {(): None if seen.policy_version is None else seen.policy_version_lag},
    ),
    (
        "plaudit_judge_circuit_open",
        "1 while a reward worker's circuit breaker for the judge is open",
        ("judge",),
        lambda seen: {(judge,): is_open for judge, is_open in seen.circuits_open.items()},
    ),
    ("plaudit_redis_memory_bytes", "Memory that Redis uses", (), lambda seen: {(): seen.memory_bytes}),
    (
        "plaudit_redis_memory_limit_bytes",
        "Memory that Redis may use; 0 = no limit",
        (),
        lambda seen: {(): seen.memory_limit_bytes},
    ),
    ("plaudit_redis_aof_ok", "1 while Redis writes its append-only file", (), lambda seen: {(): seen.aof_ok}),
)
"""Name, help text and labels of a gauge, and its values by label values in a snapshot."""


_COUNTERS: tuple[tuple[str, str, tuple[str, ...], Callable[[RunSnapshot], Mapping[tuple[str, ...], float]]], ...] = (
    (
        "plaudit_redeliveries",
        "Entries taken over from a lost worker",
        ("stream",),
        lambda seen: _of_streams(seen, seen.redeliveries),
    ),
    (
        "plaudit_duplicates",
        "Publications and commits refused as done before",
        ("stream",),
        lambda seen: _of_streams(seen, seen.duplicates),
    ),
    ("plaudit_dead_letters", "Poison records", ("stream",), lambda seen: _of_streams(seen, seen.dead_letters)),
    (
        "plaudit_judge_requests",
        "Requests to a judge, by how they ended",
        ("judge", "status"),
        lambda seen: _from_zero(seen.judge_requests, _judges(seen), _STATUSES),
    ),
    (
        "plaudit_judge_tokens",
        "Tokens that a judge read and wrote",
        ("judge", "kind"),
        lambda seen: _from_zero(seen.judge_tokens, _judges(seen), ("prompt", "completion")),
    ),
    (
        "plaudit_score_cache_reads",
        "Samples looked up in a scorer's cache: hit, or miss and then scored",
        ("scorer", "result"),
        lambda seen: _from_zero(seen.cache_reads, {scorer for scorer, _ in seen.cache_reads}, ("hit", "miss")),
    ),
)
"""The same of a counter, whose values stay while Redis does not respond."""


def _of_streams(seen: RunSnapshot, counts: Mapping[str, int]) -> Mapping[tuple[str, ...], float]:
    """Return counts by stream, from 0 on, so that the first one shows as an increase."""
    return {(stream,): count for stream, count in {**dict.fromkeys(seen.streams, 0), **counts}.items()}


def _judges(seen: RunSnapshot) -> set[str]:
    return {judge for judge, _ in (*seen.judge_requests, *seen.judge_tokens)}


def _from_zero(
    counts: Mapping[tuple[str, ...], float], names: Iterable[str], ends: Iterable[str]
) -> Mapping[tuple[str, ...], float]:
    """Return counts by name and end, with 0 for the ends that have not been counted."""
    return {**dict.fromkeys(itertools.product(names, ends), 0), **counts}


class SnapshotSeries(Collector):
    """Show streams, workers, judges and Redis; of ``roles`` those without a live process are 0, not absent."""

    def __init__(self, registry: CollectorRegistry, roles: tuple[str, ...] = (), *, has_steps: bool = True) -> None:
        self._has_steps = has_steps
        self._roles = roles
        self._seen: RunSnapshot | None = None
        """The newest snapshot; None while Redis does not respond."""
        self._responded: float | None = None
        self._counts = {name: CopiedCounts() for name, *_ in _COUNTERS}
        self._judge_requests: dict[str, tuple[int, int]] | None = None
        """Judge → failed and all requests, at the last snapshot."""
        self._judge_recent: dict[str, tuple[RecentWindow, RecentMean]] = {}
        registry.register(self)

    def show_redis_down(self) -> None:
        """Show that Redis does not respond, and nothing that was read from it earlier."""
        self._seen = None

    def show(self, seen: RunSnapshot) -> None:
        """Show streams, workers, judges and Redis as the snapshot has them."""
        self._seen, self._responded = seen, seen.time
        for name, _, _, values in _COUNTERS:
            self._counts[name].copy(values(seen))
        self._count_newest_requests(seen)

    def _count_newest_requests(self, seen: RunSnapshot) -> None:
        """Update the share of a judge's newest requests that failed; those before this process started are unknown."""
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
            window, recent = self._judge_recent.get(judge) or self._begin_judge(judge)
            window.show_time(seen.time)
            if (added := total - total_before) > 0:
                recent.add(max(failed - failed_before, 0), added, window.add(added, seen.time))

    def _begin_judge(self, judge: str) -> tuple[RecentWindow, RecentMean]:
        """Begin a judge's window: a judge's requests are recent by time, with steps too, since a sample has several."""
        window = RecentWindow(has_steps=False, most=None, idle_s=math.inf if self._has_steps else IDLE_S)
        self._judge_recent[judge] = window, RecentMean(window)
        return self._judge_recent[judge]

    def forget_recent(self) -> None:
        """Forget what is known of the recent requests to judges."""
        self._judge_recent.clear()

    def collect(self) -> Iterator[Metric]:
        """Yield the families as they are scraped; their names do not depend on a snapshot."""
        for name, documentation, labels, _ in _COUNTERS:
            yield counter_family(name, documentation, labels, self._counts[name].values)
        seen = self._seen
        yield gauge_family("plaudit_redis_up", "1 while Redis responds", (), {(): seen is not None})
        last = "When Redis responded last"
        yield gauge_family("plaudit_redis_last_seen_timestamp_seconds", last, (), {(): self._responded})
        for name, documentation, labels, values in _GAUGES:
            yield gauge_family(name, documentation, labels, values(seen) if seen else {})
        processes = self._processes(seen) if seen else {}
        yield gauge_family("plaudit_workers", "Live processes", ("role", "state"), processes)
        failed = "Share of a judge's recent requests that ended with 429, 5xx, a timeout or no connection"
        ratios: Labelled = {(judge,): recent.mean for judge, (_, recent) in self._judge_recent.items()} if seen else {}
        yield gauge_family("plaudit_judge_recent_failed_ratio", failed, ("judge",), ratios)
        yield from engine_gauges(seen.engines if seen else ())

    describe = collect

    def _processes(self, seen: RunSnapshot) -> Labelled:
        roles = {*self._roles, *(role for role, _ in seen.workers)}
        return {(role, state): seen.workers.get((role, state), 0) for role in roles for state in WORKER_STATES}


def _is_failure(status: str) -> bool:
    return status in _FAILED_STATUSES or (len(status) == 3 and status.startswith("5"))
