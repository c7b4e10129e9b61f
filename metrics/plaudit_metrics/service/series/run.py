"""Every Prometheus series of the metrics service, with one method for each event; and those of the closed steps.

Never a label: step, sample, group, pod name, prompt, error text.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Counter, Summary
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from plaudit_metrics.monitoring.rules import RECENT_STEPS
from plaudit_metrics.service.series.collectors import UNTRACED, Labelled, Naming, counter_family, gauge_family
from plaudit_metrics.service.series.sample import SampleSeries
from plaudit_metrics.service.series.snapshot import SnapshotSeries
from plaudit_metrics.sources.snapshot import RunSnapshot
from plaudit_metrics.sources.steps import VALIDATION_FIRST
from plaudit_metrics.statistics.audits import DIVERGES, DRIFT_KEY, KEY
from plaudit_metrics.statistics.integrity import (
    CORRELATION,
    LONGEST,
    OTHERS,
    WINDOW_STEPS,
    escape_probability,
    length_pays,
)
from plaudit_metrics.statistics.verdict import ALL_CAUSES
from plaudit_wire.records import GroupRecord, SampleRecord, StepRecord

_Figures = Mapping[str, float]
_Declared = tuple[str, str, tuple[str, ...], Callable[[_Figures], Labelled]]
"""Name, help text and labels of a series, and its values by label values in the figures of a step."""
_NO_WAITS = dict.fromkeys((f"wait/{cause}_s" for cause in ALL_CAUSES), 0.0)
"""A step has no figure of some causes that it did not wait for; their series are 0."""


def _keyed(name: str, documentation: str, key: str) -> _Declared:
    """Declare a series by its key in a step's figures (docs/metrics.md), a regular expression whose groups are labels.

    A group that takes no part in the match has the value ``mean``.
    """
    pattern, prefix = re.compile(key), key.partition("(")[0]

    def values(figures: _Figures) -> Labelled:
        if not pattern.groups:
            return {(): figures.get(key)}
        found = ((pattern.fullmatch(each), figures[each]) for each in figures if each.startswith(prefix))
        return {match.groups("mean"): value for match, value in found if match}

    return name, documentation, tuple(pattern.groupindex), values


_MOST_CHARACTERS = 100
"""Of a data source's name in a label."""
_DIVERGES = re.compile(f"{KEY}([^/]+)/{DIVERGES}(?:/(.+))?")


def _divergences(figures: _Figures) -> Labelled:
    """Return the probability of each auditor, with the data source that has it: none if all groups together have it."""
    found = {match.groups(): value for key, value in figures.items() if (match := _DIVERGES.fullmatch(key))}
    lowest = {scorer: value for (scorer, source), value in found.items() if source is None}
    sources = {scorer: source for (scorer, source), value in found.items() if source and value == lowest.get(scorer)}
    return {(scorer, sources.get(scorer, "")[:_MOST_CHARACTERS]): value for scorer, value in lowest.items()}


_SCORER, _BOUND, _QUANTILE = "(?P<scorer>[^/]+)", "(?:_(?P<statistic>low|high))?", "(?P<statistic>p50|p99)"
_CAUSE = f"wait/(?P<cause>{'|'.join(ALL_CAUSES)})_s"
_GAUGES: tuple[_Declared, ...] = (
    _keyed("plaudit_step", "Number", "step"),
    _keyed("plaudit_step_last_closed_timestamp_seconds", "When it was closed", "closed"),
    _keyed("plaudit_last_step_seconds", "Seconds", "step_s"),
    _keyed("plaudit_last_step_wait_seconds", "Seconds that the trainer waited, by cause", _CAUSE),
    _keyed(
        "plaudit_sample_staleness",
        "Policy versions between generation and training",
        "reward_pipeline/staleness/(?P<statistic>min|mean|max)",
    ),
    _keyed("plaudit_last_step_scorer_value", "Mean value of a scorer", f"reward_pipeline/scorer/{_SCORER}/value/mean"),
    _keyed(
        "plaudit_last_step_scorer_seconds",
        "Seconds of a scorer's last attempts, exact",
        f"reward_pipeline/scorer/{_SCORER}/call_s/{_QUANTILE}",
    ),
    _keyed(
        "plaudit_last_step_tool_seconds",
        "Seconds of a tool's calls",
        f"reward_pipeline/tool/(?P<tool>.+)/call_s/{_QUANTILE}",
    ),
    _keyed(
        "plaudit_last_step_sandbox_seconds",
        "Seconds of samples' machines in a stage, exact",
        f"reward_pipeline/sandbox/(?P<stage>.+)_s/{_QUANTILE}",
    ),
    _keyed(
        "plaudit_audit_value",
        "Mean value of an auditor over the audited samples of 20 steps; its interval",
        f"{KEY}{_SCORER}/value{_BOUND}",
    ),
    _keyed("plaudit_audit_reward", "Mean reward of the same samples; its interval", f"{KEY}{_SCORER}/reward{_BOUND}"),
    _keyed(
        "plaudit_audit_gap",
        "An auditor's mean over reinforced samples less its mean over the others",
        f"{KEY}{_SCORER}/gap{_BOUND}",
    ),
    _keyed(
        "plaudit_audit_agreement",
        "Rank correlation of reward and auditor within groups, -1 to 1",
        f"{KEY}{_SCORER}/agreement{_BOUND}",
    ),
    _keyed(
        "plaudit_scorer_drift",
        "How much more a scorer gave the same samples when it was asked again; its interval",
        f"{DRIFT_KEY}{_SCORER}/value{_BOUND}",
    ),
    _keyed("plaudit_audit_groups", "Audited groups of 20 steps", f"{KEY}{_SCORER}/groups"),
    _keyed("plaudit_audit_failed_samples", "Samples of them that an auditor gave no value", f"{KEY}{_SCORER}/failed"),
    _keyed(
        "plaudit_audit_waiting_groups", "Drawn groups of 20 steps that are not audited yet", f"{KEY}{_SCORER}/waiting"
    ),
    (
        "plaudit_audit_divergence_probability",
        "Probability that chance alone lets the reward rise and an auditor fall as seen; the data source, if it is one",
        ("scorer", "data_source"),
        _divergences,
    ),
    _keyed(
        "plaudit_last_step_exposed_reward_seconds",
        "Seconds in which the trainer waited for rewards after generation had ended",
        "exposed_reward_s",
    ),
    _keyed("plaudit_last_step_update_seconds", "Seconds spent updating the policy", "update_s"),
    _keyed("plaudit_last_step_masked_share", "Share of samples without a score", "reward_pipeline/masked_share"),
    _keyed(
        "plaudit_last_step_zero_variance_share",
        "Share of groups whose samples all have the same reward",
        "reward/zero_variance_share",
    ),
    _keyed(
        "plaudit_last_step_truncated_share",
        "Share of responses that ended at the token limit",
        "generation/truncated_share",
    ),
    _keyed(
        "plaudit_last_step_logprob_mismatch",
        "Mean absolute difference of a trained token's log-probability between rollout and trainer, same weights, nats",
        "actor/logprob_mismatch",
    ),
    _keyed(
        "plaudit_last_step_logprob_mismatch_limit",
        "The largest such difference that the precision of the model explains, nats",
        "actor/logprob_mismatch_limit",
    ),
    _keyed(
        "plaudit_last_step_skipped_updates",
        "Updates that were discarded because their gradient is not finite",
        "actor/skipped_updates",
    ),
    _keyed("plaudit_last_step_response_tokens", "Mean tokens of a response", "generation/response_tokens/mean"),
    _keyed(
        "plaudit_last_step_length_correlation", "Correlation of reward and tokens within groups, -1 to 1", CORRELATION
    ),
    _keyed(
        "plaudit_last_step_masked_longest_share", "Share without a score of the longest quarter of the samples", LONGEST
    ),
    _keyed("plaudit_last_step_masked_others_share", "Share without a score of the other samples", OTHERS),
    _keyed(
        "plaudit_last_step_tokens_per_second",
        "Response tokens by the seconds of the step",
        "generation/response_tokens_per_s",
    ),
    _keyed("plaudit_reward_mean", "Mean reward", "reward/mean"),
    _keyed("plaudit_reward_std", "Standard deviation of the rewards", "reward/std"),
)
"""Gauges of the newest closed step; those of auditors and of watched scorers, of a service as well."""


def _figures(record: StepRecord) -> _Figures:
    """Return the figures of a step that series show, with those that its record has as fields."""
    return _NO_WAITS | record.statistics | {"step": record.step, "closed": record.closed, "step_s": record.length_s}


class StepSeries(Collector):
    """Count closed steps; the series of the newest step are absent until one has closed."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lengths_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._recent: deque[Mapping[str, float]] = deque(maxlen=WINDOW_STEPS)
        self._newest: _Figures | None = None
        self._audits: _Figures = {}
        self._missing_share: float | None = None
        summary, counter = partial(Summary, registry=registry), partial(Counter, registry=registry)
        self.seconds = summary("plaudit_step_seconds", "Seconds of closed steps")
        waits = "Seconds that the trainer waited, by cause"
        self.wait_seconds = summary("plaudit_step_wait_seconds", waits, ["cause"])
        exposed = "Seconds that the trainer waited for rewards after generation had ended"
        self.exposed_reward_seconds = summary("plaudit_step_exposed_reward_seconds", exposed)
        late = "Event records that arrived after their step was closed"
        self.records_late = counter("plaudit_records_late", late)
        missing = "Samples of closed steps whose events were lost"
        self.records_missing = counter("plaudit_records_missing", missing)
        held = "CPU seconds that the machines of samples held"
        self.sandbox_cpu_seconds = counter("plaudit_sandbox_cpu_seconds", held)
        for cause in ALL_CAUSES:
            self.wait_seconds.labels(cause)
        registry.register(self)

    def count(self, record: StepRecord, *, records_missing: int) -> None:
        """Count a closed step."""
        statistics = record.statistics
        self.seconds.observe(record.length_s)
        self.exposed_reward_seconds.observe(max(statistics.get("exposed_reward_s", 0.0), 0.0))
        for cause in ALL_CAUSES:
            self.wait_seconds.labels(cause).observe(max(statistics.get(f"wait/{cause}_s", 0.0), 0.0))
        self.sandbox_cpu_seconds.inc(3600 * max(statistics.get("reward_pipeline/sandbox/cpu_hours", 0.0), 0.0))
        self.records_missing.inc(records_missing)
        self.show(record)
        self._missing_share = records_missing / record.num_samples if record.num_samples else 0.0

    def show(self, record: StepRecord) -> None:
        """Show a step as the newest without counting it."""
        self._lengths_s.append(record.length_s)
        self._recent.append(record.statistics)
        self._newest = _figures(record)

    def show_audits(self, figures: Mapping[str, float]) -> None:
        """Show the figures of a service's auditors, which no step has, by the keys that they have in a step."""
        self._audits = figures

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges as they are scraped; their names do not depend on a step."""
        longest = f"Seconds of the longest of the {RECENT_STEPS} newest closed steps"
        yield gauge_family("plaudit_recent_steps_max_seconds", longest, (), {(): max(self._lengths_s, default=None)})
        lost = "Share of samples whose events were lost; newest closed step"
        yield gauge_family("plaudit_last_step_events_lost_share", lost, (), {(): self._missing_share})
        pays = f"Share of the {WINDOW_STEPS} newest closed steps in which the reward follows length within groups"
        yield gauge_family("plaudit_length_pays_share", pays, (), {(): length_pays(self._recent)})
        escape = f"Probability that long responses lack a score by chance alone, over {WINDOW_STEPS} closed steps"
        yield gauge_family("plaudit_length_escapes_probability", escape, (), {(): escape_probability(self._recent)})
        figures = self._audits if self._newest is None else self._newest
        for name, documentation, labels, values in _GAUGES:
            yield gauge_family(name, f"{documentation}; newest closed step", labels, values(figures))

    describe = collect


TRACE_RESULTS = ("sent", "failed", "dropped")
SERVICE = "service"
"""The schedule of a job without a trainer: it only scores, and closes no steps."""


@dataclass(frozen=True)
class RunInfo:
    """Hold the facts about the job that series carry."""

    job: str = ""
    schedule: str = ""
    """``service``, ``on-policy``, ``one-step-off-policy``, ``asynchronous``; empty: unknown."""
    max_staleness: int | None = None

    @property
    def roles(self) -> tuple[str, ...]:
        """Return the roles that the job needs; nothing if the schedule is unknown."""
        if not self.schedule:
            return ()
        return ("reward",) if self.schedule == SERVICE else ("trainer", "rollout", "reward")


class RunSeries(Collector):
    """Hold the Prometheus series of one run, with their registry.

    Threshold and target are those of ``metrics.rewardLatency``; ``traces`` has counts by outcome, which another thread
    counts.
    """

    def __init__(
        self,
        *,
        latency_threshold_s: float = 30.0,
        latency_target: float = 0.99,
        info: RunInfo = RunInfo(),
        traces: Mapping[str, int] = MappingProxyType({}),
        naming: Naming = UNTRACED,
    ) -> None:
        self.registry = CollectorRegistry()
        self.info = info
        self._latency_target = latency_target
        self._traces = traces
        has_steps = "trainer" in info.roles
        self._samples = SampleSeries(self.registry, latency_threshold_s, naming, has_steps=has_steps)
        self._steps = StepSeries(self.registry)
        self._snapshot = SnapshotSeries(self.registry, info.roles, has_steps=has_steps)
        self._opened = self._step_opened = self._trainer_started = 0.0
        self._phase = "unknown"
        self._last_seen: RunSnapshot | None = None
        self.registry.register(self)

    def count_samples(self, records: Sequence[SampleRecord], *, count: bool = True) -> None:
        """Count samples that became terminal; without ``count`` only what is known of the newest samples changes."""
        self._samples.count_samples(records, count=count)

    def count_group(self, record: GroupRecord, samples: Sequence[SampleRecord]) -> None:
        """Count a closed group, and the waits of its samples for each other, for group scorers and for the trainer."""
        self._samples.count_group(record, samples)
        self.show_group(record)

    def show_group(self, record: GroupRecord) -> None:
        """Show that the trainer has closed a group: while it validates, this is how it advances."""
        if record.split == "validation":
            self._opened = max(self._opened, record.closed)

    def count_step(self, record: StepRecord, *, records_missing: int, slowest: SampleRecord | None = None) -> None:
        """Count a closed step; exemplars name its slowest sample."""
        self._begin(record.closed)
        if record.step == VALIDATION_FIRST:
            return
        self._steps.count(record, records_missing=records_missing)
        self._samples.close_step(record)
        if slowest is not None:
            self._samples.name_slowest(slowest, record.closed)

    def restore_steps(self, records: Iterable[StepRecord]) -> None:
        """Show the newest of the steps that were closed before this process started, oldest first."""
        for record in records:
            self._begin(record.closed)
            if record.step != VALIDATION_FIRST:
                self._steps.show(record)
                self._samples.close_step(record)

    def show_audits(self, figures: Mapping[str, float]) -> None:
        """Show the figures of a service's auditors."""
        self._steps.show_audits(figures)

    def _begin(self, moment: float) -> None:
        """Let the open step begin: another one closed then, or a trainer started."""
        self._opened, self._step_opened = max(self._opened, moment), max(self._step_opened, moment)

    def count_late(self, count: int) -> None:
        """Count records that arrived after their step was closed."""
        self._steps.records_late.inc(count)

    def show_redis_down(self) -> None:
        """Show that Redis does not respond, and nothing that was read from it earlier."""
        self._snapshot.show_redis_down()
        self._phase = "unknown"

    def show_snapshot(self, seen: RunSnapshot) -> None:
        """Show streams, workers and Redis as the snapshot has them."""
        is_new = seen.trainer_started not in (0.0, self._trainer_started)  # earlier, where the clock was set back
        if is_new and self._trainer_started:
            self._samples.forget_recent()
            self._snapshot.forget_recent()
        self._follow_clock(seen)
        if is_new:
            self._trainer_started = seen.trainer_started
            self._begin(seen.trainer_started)
        if scorers := seen.scorers:
            self._samples.know_scorers(scorers)
            self._samples.keep_scorers(scorers)
        self._samples.show_time(seen.time)
        self._snapshot.show(seen)
        self._phase = _phase(seen, "reward" if self.info.schedule == SERVICE else "trainer")

    def _follow_clock(self, seen: RunSnapshot) -> None:
        """Keep the age of the open step where Redis's clock was set. The trainer's stamps follow it later."""
        if self._opened and seen.time:
            set_by_s = seen.clock_set_s(self._last_seen)
            self._opened = min(self._opened + set_by_s, seen.time)
            self._step_opened = min(self._step_opened + set_by_s, seen.time)
        self._last_seen = seen

    @property
    def opened(self) -> float | None:
        """Return when the open step began (Redis's clock); None before a trainer has started."""
        return self._step_opened or None

    def collect(self) -> Iterator[Metric]:
        """Yield the families of the run itself as they are scraped."""
        info = self.info
        staleness = "" if info.max_staleness is None else str(info.max_staleness)
        labels = ("rljob", "schedule", "max_staleness", "phase")
        of_run: Labelled = {(info.job, info.schedule, staleness, self._phase): 1}
        yield gauge_family("plaudit_run_info", "The run", labels, of_run)
        counts: dict[tuple[str, ...], float] = {(result,): self._traces.get(result, 0) for result in TRACE_RESULTS}
        yield counter_family("plaudit_traces", "Traces by what became of them", ("result",), counts)
        promised = "Share of samples promised within the threshold"
        yield gauge_family("plaudit_reward_latency_target", promised, (), {(): self._latency_target})
        yield gauge_family("plaudit_staleness_limit", "maxStaleness of the job", (), {(): info.max_staleness})
        began = "When the open step began: the newest close of a step or validation group, or the trainer's start"
        yield gauge_family("plaudit_step_opened_timestamp_seconds", began, (), {(): self._opened or None})
        started = "When the live or newest trainer began to work"
        yield gauge_family(
            "plaudit_trainer_started_timestamp_seconds", started, (), {(): self._trainer_started or None}
        )

    describe = collect


def _phase(seen: RunSnapshot, driver: str) -> str:
    """Return ``running`` while the role that drives the run is ready, ``starting`` before, ``stopped`` without one."""
    states = {state for (role, state), count in seen.workers.items() if role == driver and count > 0}
    if not states:
        return "stopped"
    return "starting" if states == {"starting"} else "running"
