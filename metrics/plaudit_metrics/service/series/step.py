"""Declare and count the Prometheus series of closed steps."""

from __future__ import annotations

from collections import deque

from prometheus_client import CollectorRegistry, Counter, Summary

from plaudit_metrics.alerting.thresholds import RECENT_STEPS
from plaudit_metrics.service.series.optional_gauge import OptionalGauge
from plaudit_metrics.statistics.waits import CAUSES
from plaudit_wire.records import StepRecord

_STATISTICS = {
    "plaudit_last_step_exposed_reward_seconds": (
        "exposed_reward_s",
        "Seconds in which the trainer waited for rewards after generation had ended",
    ),
    "plaudit_last_step_update_seconds": ("update_s", "Seconds spent updating the policy"),
    "plaudit_last_step_masked_share": ("reward_pipeline/masked_share", "Share of samples without a score"),
    "plaudit_last_step_zero_variance_share": (
        "reward/zero_variance_share",
        "Share of groups whose samples all have the same reward",
    ),
    "plaudit_last_step_truncated_share": (
        "generation/truncated_share",
        "Share of responses that ended at the token limit",
    ),
    "plaudit_last_step_logprob_mismatch": (
        "actor/logprob_mismatch",
        "Mean absolute difference of a trained token's log-probability between rollout and trainer, same weights, nats",
    ),
    "plaudit_last_step_logprob_mismatch_limit": (
        "actor/logprob_mismatch_limit",
        "The largest such difference that the precision of the model explains, nats",
    ),
    "plaudit_last_step_skipped_updates": (
        "actor/skipped_updates",
        "Updates that were discarded because their gradient is not finite",
    ),
    "plaudit_last_step_tokens_per_second": (
        "generation/response_tokens_per_s",
        "Response tokens by the seconds of the step",
    ),
    "plaudit_reward_mean": ("reward/mean", "Mean reward"),
    "plaudit_reward_std": ("reward/std", "Standard deviation of the rewards"),
}
"""Gauge of the newest closed step → its key of a step's figures, and its help text."""
_TOOL = "reward_pipeline/tool/"


class StepSeries:
    """Count closed steps; the series of the newest step are absent until one has closed."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lengths_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._declare_totals(registry)
        self._declare_newest(registry)

    def _declare_totals(self, registry: CollectorRegistry) -> None:
        self.seconds = Summary("plaudit_step_seconds", "Seconds of closed steps", registry=registry)
        self.wait_seconds = Summary(
            "plaudit_step_wait_seconds", "Seconds that the trainer waited, by cause", ["cause"], registry=registry
        )
        self.exposed_reward_seconds = Summary(
            "plaudit_step_exposed_reward_seconds",
            "Seconds that the trainer waited for rewards after generation had ended",
            registry=registry,
        )
        self.records_late = Counter(
            "plaudit_records_late", "Event records that arrived after their step was closed", registry=registry
        )
        self.records_missing = Counter(
            "plaudit_records_missing", "Samples of closed steps whose events were lost", registry=registry
        )
        for cause in CAUSES:
            self.wait_seconds.labels(cause)

    def _declare_newest(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, documentation: str, *labels: str) -> OptionalGauge:
            return OptionalGauge(name, f"{documentation}; newest closed step", labels, registry)

        self._step = gauge("plaudit_step", "Number")
        self._last_closed = gauge("plaudit_step_last_closed_timestamp_seconds", "When it was closed")
        self._last_seconds = gauge("plaudit_last_step_seconds", "Seconds")
        self._last_wait = gauge("plaudit_last_step_wait_seconds", "Seconds that the trainer waited, by cause", "cause")
        self._last_missing = gauge("plaudit_last_step_events_lost_share", "Share of samples whose events were lost")
        self._staleness = gauge(
            "plaudit_sample_staleness", "Policy versions between generation and training", "statistic"
        )
        self._scorer_value = gauge("plaudit_last_step_scorer_value", "Mean value of a scorer", "scorer")
        self._scorer_seconds = gauge(
            "plaudit_last_step_scorer_seconds", "Seconds of a scorer's last attempts, exact", "scorer", "statistic"
        )
        self._tool_seconds = gauge("plaudit_last_step_tool_seconds", "Seconds of a tool's calls", "tool", "statistic")
        self._statistics = {name: gauge(name, text) for name, (_, text) in _STATISTICS.items()}
        self._longest = OptionalGauge(
            "plaudit_recent_steps_max_seconds",
            f"Seconds of the longest of the {RECENT_STEPS} newest closed steps",
            [],
            registry,
        )

    def count(self, record: StepRecord, *, records_missing: int) -> None:
        """Count a closed step."""
        statistics = record.statistics
        self.seconds.observe(record.closed - record.opened)
        self.exposed_reward_seconds.observe(statistics.get("exposed_reward_s", 0.0))
        for cause in CAUSES:
            self.wait_seconds.labels(cause).observe(statistics.get(f"wait/{cause}_s", 0.0))
        self.records_missing.inc(records_missing)
        self.show(record)
        self._last_missing.set(records_missing / record.num_samples if record.num_samples else 0.0)

    def show(self, record: StepRecord) -> None:
        """Show a step as the newest without counting it."""
        statistics = record.statistics
        self._lengths_s.append(record.closed - record.opened)
        self._longest.set(max(self._lengths_s))
        self._step.set(record.step)
        self._last_closed.set(record.closed)
        self._last_seconds.set(record.closed - record.opened)
        self._last_wait.replace({(cause,): statistics.get(f"wait/{cause}_s", 0.0) for cause in CAUSES})
        for name, (key, _) in _STATISTICS.items():
            self._statistics[name].set(statistics.get(key))
        for statistic in ("min", "mean", "max"):
            self._staleness.set(statistics.get(f"reward_pipeline/staleness/{statistic}"), statistic)
        self._show_scorers(record)
        self._show_tools(record)

    def _show_scorers(self, record: StepRecord) -> None:
        values: dict[tuple[str, ...], float] = {}
        seconds: dict[tuple[str, ...], float] = {}
        for key, value in record.statistics.items():
            head, _, rest = key.partition("reward_pipeline/scorer/")
            name, _, figure = rest.partition("/")
            if head or not name:
                continue
            if figure == "value/mean":
                values[(name,)] = value
            elif figure in ("call_s/p50", "call_s/p99"):
                seconds[name, figure[-3:]] = value
        self._scorer_value.replace(values)
        self._scorer_seconds.replace(seconds)

    def _show_tools(self, record: StepRecord) -> None:
        seconds: dict[tuple[str, ...], float] = {}
        for key, value in record.statistics.items():
            name, _, figure = key.removeprefix(_TOOL).rpartition("/call_s/")
            if key.startswith(_TOOL) and figure in ("p50", "p99"):
                seconds[name, figure] = value
        self._tool_seconds.replace(seconds)
