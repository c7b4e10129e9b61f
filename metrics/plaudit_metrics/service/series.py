"""Declare every Prometheus series of the metrics service; one method an event.

Never a label: step, sample, group, pod name, prompt, error text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Summary

from plaudit_metrics.service.copied_counter import CopiedCounter
from plaudit_metrics.sources.run_snapshot import WORKER_STATES, RunSnapshot
from plaudit_metrics.statistics.batch_histogram import BatchHistogram
from plaudit_metrics.statistics.columns import SampleColumns
from plaudit_metrics.statistics.stages import group_stage_seconds, sample_stage_seconds
from plaudit_metrics.statistics.waits import CAUSES
from plaudit_wire.records import OUTCOMES, GroupRecord, SampleRecord, StepRecord

_MISMATCH_BUCKETS = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)


class Series:
    """The series and their registry.

    Args:
        latency_threshold_s: a sample scored within this time after its publication is a good one
            (``metrics.rewardLatency.thresholdSeconds``).
        latency_target: the share of good samples that is promised (``metrics.rewardLatency.target``).
    """

    def __init__(self, *, latency_threshold_s: float = 30.0, latency_target: float = 0.99) -> None:
        self.registry = CollectorRegistry()
        self._latency_threshold_s = latency_threshold_s
        self._declare_samples()
        self._declare_steps()
        self._declare_snapshot()
        self.reward_latency_target.set(latency_target)

    def _declare_samples(self) -> None:
        registry = self.registry
        self.stage_seconds = BatchHistogram(
            "plaudit_stage_seconds", "Seconds that samples spent in a stage", ["stage"], registry
        )
        self.score_seconds = BatchHistogram(
            "plaudit_score_seconds", "Seconds of a scorer's last attempt on a sample", ["scorer", "outcome"], registry
        )
        self.limiter_wait_seconds = BatchHistogram(
            "plaudit_limiter_wait_seconds", "Seconds that a scorer waited for its limits", ["judge"], registry
        )
        self.logprob_mismatch = BatchHistogram(
            "plaudit_logprob_mismatch",
            "Mean difference of the rollout's and the trainer's log-probabilities, by a sample's weights",
            [],
            registry,
            _MISMATCH_BUCKETS,
        )
        self.samples = Counter("plaudit_samples", "Terminal samples", ["outcome"], registry=registry)
        self.groups = Counter("plaudit_groups", "Closed groups", ["outcome"], registry=registry)
        self.reward_latency_good = Counter(
            "plaudit_reward_latency_good", "Samples scored within the job's threshold", registry=registry
        )
        self.reward_latency = Counter(
            "plaudit_reward_latency", "Samples that became terminal after publication", registry=registry
        )
        self.reward_latency_target = Gauge(
            "plaudit_reward_latency_target", "Share of samples promised within the threshold", registry=registry
        )
        self.records_late = Counter(
            "plaudit_records_late", "Event records that arrived after their step was closed", registry=registry
        )
        self.records_missing = Counter(
            "plaudit_records_missing", "Samples of closed steps whose events were lost", registry=registry
        )
        for outcome in OUTCOMES:
            self.samples.labels(outcome)
        for end in ("trained", "evaluated", "dropped"):
            self.groups.labels(end)

    def _declare_steps(self) -> None:
        registry = self.registry
        self.step = Gauge("plaudit_step", "Newest closed step", registry=registry)
        self.step_last_closed = Gauge(
            "plaudit_step_last_closed_timestamp_seconds", "When the newest step was closed", registry=registry
        )
        self.step_seconds = Summary("plaudit_step_seconds", "Seconds of closed steps", registry=registry)
        self.step_wait_seconds = Summary(
            "plaudit_step_wait_seconds", "Seconds that the trainer waited, by cause", ["cause"], registry=registry
        )
        self.step_exposed_reward_seconds = Summary(
            "plaudit_step_exposed_reward_seconds",
            "Seconds that the trainer waited for rewards after generation had ended",
            registry=registry,
        )
        self.last_step = Gauge("plaudit_last_step_seconds", "Seconds of the newest closed step", registry=registry)
        self.last_step_exposed_reward = Gauge(
            "plaudit_last_step_exposed_reward_seconds",
            "Seconds of the newest closed step in which the trainer waited for rewards after generation had ended",
            registry=registry,
        )
        self.last_step_wait = Gauge(
            "plaudit_last_step_wait_seconds",
            "Seconds of the newest closed step in which the trainer waited, by cause",
            ["cause"],
            registry=registry,
        )
        self.last_step_masked_share = Gauge(
            "plaudit_last_step_masked_share",
            "Share of the newest closed step's samples without a score",
            registry=registry,
        )
        self.reward_mean = Gauge("plaudit_reward_mean", "Mean reward of the newest closed step", registry=registry)
        self.staleness = Gauge(
            "plaudit_sample_staleness",
            "Policy versions between generation and training, newest closed step",
            ["statistic"],
            registry=registry,
        )
        for cause in CAUSES:
            self.step_wait_seconds.labels(cause)

    def _declare_snapshot(self) -> None:
        registry = self.registry
        self.stream_undelivered = Gauge(
            "plaudit_stream_undelivered", "Entries that no consumer has read", ["stream"], registry=registry
        )
        self.stream_in_flight = Gauge(
            "plaudit_stream_in_flight", "Entries that a consumer works on", ["stream"], registry=registry
        )
        self.stream_oldest_undelivered = Gauge(
            "plaudit_stream_oldest_undelivered_seconds",
            "Age of the oldest entry that no consumer has read; 0 when there is none",
            ["stream"],
            registry=registry,
        )
        self.redeliveries = CopiedCounter(
            "plaudit_redeliveries", "Entries taken over from a lost worker", ["stream"], registry
        )
        self.duplicates = CopiedCounter(
            "plaudit_duplicates", "Publications and commits refused as done before", ["stream"], registry
        )
        self.dead_letters = CopiedCounter("plaudit_dead_letters", "Poison records", ["stream"], registry)
        self.judge_requests = CopiedCounter(
            "plaudit_judge_requests", "Requests to a judge, by how they ended", ["judge", "status"], registry
        )
        self.judge_tokens = CopiedCounter(
            "plaudit_judge_tokens", "Tokens that a judge read and wrote", ["judge", "kind"], registry
        )
        self.judge_circuit_open = Gauge(
            "plaudit_judge_circuit_open",
            "1 while a reward worker's circuit breaker for the judge is open",
            ["judge"],
            registry=registry,
        )
        self.workers = Gauge("plaudit_workers", "Live processes", ["role", "state"], registry=registry)
        self.policy_version = Gauge("plaudit_policy_version", "Announced policy version", registry=registry)
        self.policy_version_lag = Gauge(
            "plaudit_policy_version_lag",
            "Policy versions by which the slowest ready rollout is behind",
            registry=registry,
        )
        self.redis_up = Gauge("plaudit_redis_up", "1 while Redis responds", registry=registry)
        self.redis_last_seen = Gauge(
            "plaudit_redis_last_seen_timestamp_seconds",
            "When Redis responded last; all figures of streams, workers and Redis are from then",
            registry=registry,
        )
        self.redis_memory = Gauge("plaudit_redis_memory_bytes", "Memory that Redis uses", registry=registry)
        self.redis_memory_limit = Gauge(
            "plaudit_redis_memory_limit_bytes", "Memory that Redis may use; 0 = no limit", registry=registry
        )
        self.redis_aof_ok = Gauge(
            "plaudit_redis_aof_ok", "1 while Redis writes its append-only file", registry=registry
        )

    def count_samples(self, records: Sequence[SampleRecord]) -> None:
        """Count samples that became terminal."""
        if not records:
            return
        columns = SampleColumns.from_records(records)
        for stage, seconds in sample_stage_seconds(columns).items():
            self.stage_seconds.observe(seconds, stage)
        for outcome, count in zip(OUTCOMES, np.bincount(columns.outcome, minlength=len(OUTCOMES)), strict=True):
            self.samples.labels(outcome).inc(int(count))
        for name, scorer in columns.scorers.items():
            self.limiter_wait_seconds.observe(scorer.limiter_s, name)
            for code in np.unique(scorer.outcome):
                self.score_seconds.observe(scorer.call_s[scorer.outcome == code], name, OUTCOMES[code])
        mismatches = [record.generation.logprob_mismatch for record in records if record.generation is not None]
        self.logprob_mismatch.observe(np.array(mismatches, dtype=np.float64))
        latency_s = (columns.committed - columns.published)[~np.isnan(columns.published)]
        self.reward_latency.inc(len(latency_s))
        self.reward_latency_good.inc(int((latency_s <= self._latency_threshold_s).sum()))

    def count_group(self, record: GroupRecord, samples: Sequence[SampleRecord]) -> None:
        """Count a closed group, and the waits of its samples for each other, for group scorers and for the trainer."""
        self.groups.labels(record.end).inc()
        if not samples:
            return
        seconds = group_stage_seconds(SampleColumns.from_records(samples), {record.group: record})
        self.stage_seconds.observe(seconds["group_wait"], "group_wait")
        self.stage_seconds.observe(seconds["group_scorer"][:1], "group_scorer")
        self.stage_seconds.observe(seconds["ready_queue"][:1], "ready_queue")

    def count_step(self, record: StepRecord, *, records_missing: int) -> None:
        """Count a closed step."""
        statistics = record.statistics
        self.step_seconds.observe(record.closed - record.opened)
        self.step_exposed_reward_seconds.observe(statistics.get("exposed_reward_s", 0.0))
        for cause in CAUSES:
            self.step_wait_seconds.labels(cause).observe(statistics.get(f"wait/{cause}_s", 0.0))
        self.records_missing.inc(records_missing)
        self.show_step(record)

    def show_step(self, record: StepRecord) -> None:
        """Show a step as the newest without counting it, such as one that was closed before this process started."""
        self.step.set(record.step)
        self.step_last_closed.set(record.closed)
        self._show_last_step(record)
        if "reward/mean" in record.statistics:
            self.reward_mean.set(record.statistics["reward/mean"])
        for statistic in ("min", "mean", "max"):
            if (staleness := record.statistics.get(f"reward_pipeline/staleness/{statistic}")) is not None:
                self.staleness.labels(statistic).set(staleness)

    def _show_last_step(self, record: StepRecord) -> None:
        statistics = record.statistics
        self.last_step.set(record.closed - record.opened)
        self.last_step_exposed_reward.set(statistics.get("exposed_reward_s", 0.0))
        for cause in CAUSES:
            self.last_step_wait.labels(cause).set(statistics.get(f"wait/{cause}_s", 0.0))
        self.last_step_masked_share.set(statistics.get("reward_pipeline/masked_share", 0.0))

    def count_late(self, count: int) -> None:
        """Count records that arrived after their step was closed."""
        self.records_late.inc(count)

    def show_redis_down(self) -> None:
        """Show that Redis does not respond. All figures read from it stay as they were."""
        self.redis_up.set(0)

    def show_snapshot(self, seen: RunSnapshot) -> None:
        """Show streams, workers and Redis as the snapshot has them."""
        self.redis_up.set(1)
        self.redis_last_seen.set(seen.time)
        for stream, depth in seen.streams.items():
            self.stream_undelivered.labels(stream).set(depth.undelivered)
            self.stream_in_flight.labels(stream).set(depth.in_flight)
            self.stream_oldest_undelivered.labels(stream).set(depth.oldest_undelivered_s)
        none = dict.fromkeys(seen.streams, 0)  # counted from 0 on, so that the first one shows as an increase
        self.redeliveries.copy(_one_label(none | seen.redeliveries))
        self.duplicates.copy(_one_label(none | seen.duplicates))
        self.dead_letters.copy(_one_label(none | seen.dead_letters))
        self.judge_requests.copy(seen.judge_requests)
        self.judge_tokens.copy(seen.judge_tokens)
        for judge, is_open in seen.circuits_open.items():
            self.judge_circuit_open.labels(judge).set(is_open)
        self.workers.clear()
        for role in {role for role, _ in seen.workers}:
            for state in WORKER_STATES:
                self.workers.labels(role, state).set(seen.workers.get((role, state), 0))
        if seen.policy_version is not None:
            self.policy_version.set(seen.policy_version)
            self.policy_version_lag.set(seen.policy_version_lag)
        self.redis_memory.set(seen.memory_bytes)
        self.redis_memory_limit.set(seen.memory_limit_bytes)
        self.redis_aof_ok.set(1.0 if seen.aof_ok else 0.0)


def _one_label(values: Mapping[str, int]) -> dict[tuple[str, ...], float]:
    return {(label,): value for label, value in values.items()}
