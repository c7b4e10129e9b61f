"""Every Prometheus series of the metrics service; one method an event.

Never a label: step, sample, group, pod name, prompt, error text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from plaudit_metrics.service.series.exemplars import UNTRACED, Naming
from plaudit_metrics.service.series.optional_gauge import OptionalGauge
from plaudit_metrics.service.series.sample import SampleSeries
from plaudit_metrics.service.series.snapshot import SnapshotSeries
from plaudit_metrics.service.series.step import StepSeries
from plaudit_metrics.sources.run_snapshot import RunSnapshot
from plaudit_wire.records import GroupRecord, SampleRecord, StepRecord

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


class RunSeries:
    """Hold the Prometheus series of one run, with their registry.

    Args:
        latency_threshold_s: a sample scored within this time after its publication is in time
            (``metrics.rewardLatency.thresholdSeconds``).
        latency_target: the promised share of samples in time (``metrics.rewardLatency.target``).
        traces: returns the counts of traces by outcome; called at each scrape.
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
        self._info = info
        self._samples = SampleSeries(self.registry, latency_threshold_s, naming)
        self._steps = StepSeries(self.registry)
        self._snapshot = SnapshotSeries(self.registry, info.roles)
        self._run_info = OptionalGauge(
            "plaudit_run_info", "The run", ["rljob", "schedule", "max_staleness", "phase"], self.registry
        )
        self.registry.register(_Traces(traces))
        target = Gauge(
            "plaudit_reward_latency_target", "Share of samples promised within the threshold", registry=self.registry
        )
        target.set(latency_target)
        limit = OptionalGauge("plaudit_staleness_limit", "maxStaleness of the job", [], self.registry)
        limit.set(info.max_staleness)
        self._opened = OptionalGauge(
            "plaudit_step_opened_timestamp_seconds",
            "When the open step began: the newest close, or the start of the trainer if that is later",
            [],
            self.registry,
        )
        self._last_closed = self._trainer_started = 0.0
        self._show_phase("unknown")

    def count_samples(self, records: Sequence[SampleRecord], *, count: bool = True) -> None:
        """Count samples that became terminal; without ``count`` only what is known of the newest samples changes."""
        self._samples.count_samples(records, count=count)

    def count_group(self, record: GroupRecord, samples: Sequence[SampleRecord]) -> None:
        """Count a closed group, and the waits of its samples for each other, for group scorers and for the trainer."""
        self._samples.count_group(record, samples)

    def count_step(self, record: StepRecord, *, records_missing: int, slowest: SampleRecord | None = None) -> None:
        """Count a closed step; exemplars name its slowest sample."""
        self._steps.count(record, records_missing=records_missing)
        self._show_opened(record.closed, 0.0)
        if slowest is not None:
            self._samples.name_slowest(slowest, record.closed)

    def restore_steps(self, records: Iterable[StepRecord]) -> None:
        """Show the newest of the steps that were closed before this process started, oldest first."""
        for record in records:
            self._steps.show(record)
            self._show_opened(record.closed, 0.0)

    def count_late(self, count: int) -> None:
        """Count records that arrived after their step was closed."""
        self._steps.records_late.inc(count)

    def show_redis_down(self) -> None:
        """Show that Redis does not respond, and nothing that was read from it earlier."""
        self._snapshot.show_redis_down()
        self._show_phase("unknown")

    def show_snapshot(self, seen: RunSnapshot) -> None:
        """Show streams, workers and Redis as the snapshot has them."""
        self._snapshot.show(seen)
        self._show_opened(0.0, seen.trainer_started)
        self._show_phase(_phase(seen, SERVICE if self._info.schedule == SERVICE else "trainer"))

    def _show_opened(self, last_closed: float, trainer_started: float) -> None:
        self._last_closed = max(self._last_closed, last_closed)
        self._trainer_started = max(self._trainer_started, trainer_started)
        self._opened.set(max(self._last_closed, self._trainer_started) or None)

    def _show_phase(self, phase: str) -> None:
        staleness = "" if self._info.max_staleness is None else str(self._info.max_staleness)
        self._run_info.replace({(self._info.job, self._info.schedule, staleness, phase): 1})


class _Traces(Collector):
    """Expose the counter of traces, which another thread counts."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = counts

    def describe(self) -> Iterator[CounterMetricFamily]:
        """Yield the counter without values."""
        yield CounterMetricFamily("plaudit_traces", "Traces by what became of them", labels=["result"])

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the counter, with 0 for what has not happened."""
        family = CounterMetricFamily("plaudit_traces", "Traces by what became of them", labels=["result"])
        for result in TRACE_RESULTS:
            family.add_metric([result], self._counts.get(result, 0))
        yield family


def _phase(seen: RunSnapshot, kind: str) -> str:
    """Return ``running`` while the process that drives the run is ready, ``starting`` before, ``stopped`` without."""
    role = "reward" if kind == SERVICE else "trainer"
    states = {state for (each, state), count in seen.workers.items() if each == role and count > 0}
    if not states:
        return "stopped"
    return "starting" if states == {"starting"} else "running"
