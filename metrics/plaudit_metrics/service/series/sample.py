"""Declare and count the Prometheus series of samples and groups, as their records arrive."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge

from plaudit_metrics.monitoring.rules import LEAST_SAMPLES
from plaudit_metrics.service.series.collectors import (
    UNTRACED,
    NamedSamples,
    Naming,
    RecentMeans,
    RecentWindow,
    SandboxSeries,
    ToolSeries,
)
from plaudit_metrics.statistics.columns import Flags, SampleColumns
from plaudit_metrics.statistics.stages import STAGES, BatchHistogram, group_stage_seconds, sample_stage_seconds
from plaudit_wire.records import OUTCOMES, GroupRecord, SampleRecord, StepRecord

_MISMATCH_BUCKETS = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
_TOKEN_BUCKETS = tuple(float(1 << power) for power in range(4, 18))
_FAILED = np.array([outcome in ("infra_error", "timeout", "data_error") for outcome in OUTCOMES])
_IN_TIME = np.array([outcome in ("scored", "skipped") for outcome in OUTCOMES])
"""A sample that failed fast is not scored in time."""


class SampleSeries:
    """Count the series of samples and groups; a sample scored within the threshold after publication is in time.

    ``has_steps``: a trainer closes steps; then the recent samples are its training samples alone.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        latency_threshold_s: float,
        naming: Naming = UNTRACED,
        *,
        has_steps: bool = True,
    ) -> None:
        self._latency_threshold_s = latency_threshold_s
        self._naming = naming
        self._has_steps = has_steps
        self._scorers: set[str] = set()
        self._window = RecentWindow(has_steps=has_steps)
        self._declare_durations(registry)
        self._declare_counts(registry)
        self._declare_recent(registry)
        self._tools = ToolSeries(registry, self._window)
        self._sandboxes = SandboxSeries(registry, self._window)

    def _declare_durations(self, registry: CollectorRegistry) -> None:
        histogram = partial(BatchHistogram, registry=registry)
        self.stage_seconds = histogram("plaudit_stage_seconds", "Seconds that samples spent in a stage", ["stage"])
        self.score_seconds = histogram(
            "plaudit_score_seconds", "Seconds of a scorer's last attempt on a sample", ["scorer", "outcome"]
        )
        waits = "Seconds that a scorer waited for its limits"
        self.limiter_wait_seconds = histogram("plaudit_limiter_wait_seconds", waits, ["judge"])
        mismatch = "Mean difference of the rollout's and the trainer's log-probabilities, by a sample's weights"
        self.logprob_mismatch = histogram("plaudit_logprob_mismatch", mismatch, [], buckets=_MISMATCH_BUCKETS)
        for stage in STAGES:
            self.stage_seconds.begin(stage)
        tokens = "Tokens of the responses"
        self.response_tokens = histogram("plaudit_response_tokens", tokens, [], buckets=_TOKEN_BUCKETS)

    def _declare_counts(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        self.samples = counter("plaudit_samples", "Terminal samples", ["outcome"])
        self.groups = counter("plaudit_groups", "Closed groups", ["outcome"])
        self.preemptions = counter("plaudit_preemptions", "Preemptions of samples by the engine")
        good = "Samples scored within the job's threshold"
        self.latency_good = counter("plaudit_reward_latency_good", good, ["split"])
        ended = "Samples that became terminal after publication"
        self.latency = counter("plaudit_reward_latency", ended, ["split"])
        threshold = Gauge("plaudit_reward_latency_threshold_seconds", "The job's threshold", registry=registry)
        threshold.set(self._latency_threshold_s)
        for outcome in OUTCOMES:
            self.samples.labels(outcome)
        for end in ("trained", "evaluated", "dropped"):
            self.groups.labels(end)
        for split in ("train", "validation"):
            self.latency.labels(split)
            self.latency_good.labels(split)

    def _declare_recent(self, registry: CollectorRegistry) -> None:
        means = partial(RecentMeans, window=self._window, registry=registry)
        late = "Share of late samples among the recent training samples: those of a whole step"
        self._recent_late = means("plaudit_recent_late_ratio", late, [])
        failed = "Share of the recent samples whose scoring failed"
        self._recent_failed = means(
            "plaudit_recent_failed_ratio", failed, [], low=("plaudit_recent_failed_low_ratio", LEAST_SAMPLES)
        )
        calls = "Share of a scorer's recent calls that failed"
        self._recent_scorer_failed = means(
            "plaudit_scorer_recent_failed_ratio", calls, ["scorer"], low=("plaudit_scorer_recent_failed_low_ratio", 1)
        )
        waits = "Mean wait of a scorer's recent calls for limits"
        self._recent_limiter_wait = means("plaudit_limiter_recent_wait_seconds", waits, ["judge"])

    def know_scorers(self, names: Iterable[str]) -> None:
        """Begin the counters of these scorers at 0."""
        for name in set(names) - self._scorers:
            self._scorers.add(name)
            self.limiter_wait_seconds.begin(name)
            for outcome in OUTCOMES:
                self.score_seconds.begin(name, outcome)

    def keep_scorers(self, names: Collection[str]) -> None:
        """Forget the recent calls of scorers that no reward worker has: a service has no step that ends them."""
        for means in (self._recent_scorer_failed, self._recent_limiter_wait):
            means.keep(names)

    def close_step(self, record: StepRecord) -> None:
        """Note the length of a step that has closed, in samples."""
        self._window.close_step(record.num_samples)

    def show_time(self, now: float) -> None:
        """Note that it is now this late (seconds since the epoch, Redis's clock)."""
        self._window.show_time(now)

    def forget_recent(self) -> None:
        """Forget what is known of the recent samples: a trainer has started, after a repair or on other settings."""
        for means in (
            self._recent_late,
            self._recent_failed,
            self._recent_scorer_failed,
            self._recent_limiter_wait,
            self._tools,
            self._sandboxes,
        ):
            means.forget()

    def count_samples(self, records: Sequence[SampleRecord], *, count: bool = True) -> None:
        """Count samples that became terminal; without ``count`` only what is known of the newest samples changes."""
        if not records:
            return
        columns = SampleColumns.from_records(records)
        self.know_scorers(columns.scorers)
        mismatches = np.array(
            [each.generation.logprob_mismatch for each in records if each.generation is not None], dtype=np.float64
        )
        in_training = np.array([record.split == "train" for record in records])
        latency_s = columns.committed - columns.published
        in_time = (latency_s <= self._latency_threshold_s) & _IN_TIME[columns.outcome]
        published = ~np.isnan(columns.published)
        self._remember(records, columns, in_training, ~in_time[published & in_training])
        if not count:
            return
        for split, of_split in (("train", in_training), ("validation", ~in_training)):
            self.latency.labels(split).inc(int((published & of_split).sum()))
            self.latency_good.labels(split).inc(int((in_time & published & of_split).sum()))
        self.logprob_mismatch.observe(mismatches)
        self._count(columns)
        self._count_latencies(columns, records)

    def _count_latencies(self, columns: SampleColumns, records: Sequence[SampleRecord]) -> None:
        named = self._naming.among(records)
        for stage, seconds in sample_stage_seconds(columns).items():
            self.stage_seconds.observe(seconds, stage, source=named)
        for name, scorer in columns.scorers.items():
            asked = [place for place, record in enumerate(records) if name in record.scoring.scorers]
            of_scorer = named.take(np.array(asked, dtype=np.int64))
            self.limiter_wait_seconds.observe(scorer.limiter_s, name, source=of_scorer)
            for code in np.unique(scorer.outcome):
                places = np.flatnonzero(scorer.outcome == code)
                self.score_seconds.observe(scorer.call_s[places], name, OUTCOMES[code], source=of_scorer.take(places))

    def _count(self, columns: SampleColumns) -> None:
        for outcome, number in zip(OUTCOMES, np.bincount(columns.outcome, minlength=len(OUTCOMES)), strict=True):
            self.samples.labels(outcome).inc(int(number))
        self.response_tokens.observe(columns.response_tokens[columns.generated].astype(np.float64))
        known = columns.generated & (columns.num_preempted >= 0)
        self.preemptions.inc(int(columns.num_preempted[known].sum()))
        self._tools.count(columns.turns.tools)
        self._sandboxes.count(columns.sandboxes)

    def _remember(
        self, records: Sequence[SampleRecord], columns: SampleColumns, in_training: Flags, late: Flags
    ) -> None:
        """Update the shares among the recent samples."""
        if self._has_steps and not in_training.all():
            records = [record for record, trains in zip(records, in_training, strict=True) if trains]
            columns = SampleColumns.from_records(records)
        if not records:
            return
        ended = max(record.stamps.committed or record.stamps.admitted for record in records)
        place = self._window.add(len(records), ended)
        self._recent_late.add(float(late.sum()), len(late), place)
        self._recent_failed.add(float(_FAILED[columns.outcome].sum()), len(columns), place)
        for name, scorer in columns.scorers.items():
            asked = len(scorer.outcome)
            self._recent_scorer_failed.add(float(_FAILED[scorer.outcome].sum()), asked, place, name)
            self._recent_limiter_wait.add(float(scorer.limiter_s.sum()), asked, place, name)
        self._tools.remember(columns.turns.tools, place)
        self._sandboxes.remember(columns.sandboxes, place)

    def count_group(self, record: GroupRecord, samples: Sequence[SampleRecord]) -> None:
        """Count a closed group, and the waits of its samples for each other, for group scorers and for the trainer."""
        self.groups.labels(record.end).inc()
        if not samples:
            return
        seconds = group_stage_seconds(SampleColumns.from_records(samples), {record.group: record})
        self.stage_seconds.observe(seconds["group_wait"], "group_wait", source=self._naming.among(samples))
        self.stage_seconds.observe(seconds["group_scorer"][:1], "group_scorer")
        self.stage_seconds.observe(seconds["ready_queue"][:1], "ready_queue")

    def name_slowest(self, sample: SampleRecord, closed: float) -> None:
        """Let exemplars name the slowest sample of a step that has just closed: its trace is sent in any case."""
        columns = SampleColumns.from_records([sample])
        named = NamedSamples(self._naming, [sample], np.ones(1, dtype=np.bool_), at=closed)
        for stage, seconds in sample_stage_seconds(columns).items():
            self.stage_seconds.name(seconds, stage, source=named)
        for name, scorer in columns.scorers.items():
            self.limiter_wait_seconds.name(scorer.limiter_s, name, source=named)
            self.score_seconds.name(scorer.call_s, name, OUTCOMES[scorer.outcome[0]], source=named)
