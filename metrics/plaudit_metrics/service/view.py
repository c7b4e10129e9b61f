"""Hold the state of a run as the service knows it: fed with records, read by the API and the scrapes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from plaudit_metrics.monitoring.rules import RECENT_STEPS
from plaudit_metrics.service.series.run import RunSeries
from plaudit_metrics.sources.snapshot import QueueHistory, RunSnapshot
from plaudit_metrics.sources.steps import Arrival, Collector, EncodedStep, KeptSteps
from plaudit_metrics.sources.stream import EventRecord
from plaudit_metrics.statistics.columns import FailureCounts
from plaudit_wire.records import NO_STEP, GroupRecord, SampleRecord, StepRecord


class RunView:
    """Join the collector, the series and the newest snapshot; call ``closed`` with each new step and its samples."""

    def __init__(
        self, series: RunSeries, kept: KeptSteps, closed: Callable[[StepRecord, EncodedStep], None] | None = None
    ) -> None:
        self._closed = closed
        self.series = series
        self.kept = kept
        self.collector = Collector(kept)
        self.snapshot = RunSnapshot()
        self.observed_s = time.monotonic()
        """When Redis responded last (monotonic)."""
        self.queues = QueueHistory()
        self.failures = FailureCounts()
        """Of the samples that ended since the newest step closed."""

    def restore(self, records: Sequence[StepRecord]) -> None:
        """Add the steps of ``steps.jsonl``, which are shown but not counted."""
        self.kept.restore(records)
        self.series.restore_steps(step.record for step in self.kept.newest(RECENT_STEPS))

    def handle(self, records: list[EventRecord], count: bool) -> None:
        """Add a batch of event records; ``count`` is False for those that an earlier start counted."""
        new_samples: list[SampleRecord] = []
        late_before = self.collector.late
        for record in records:
            if isinstance(record, SampleRecord):
                if record.step == NO_STEP or self.collector.add_sample(record) is Arrival.new:
                    new_samples.append(record)
                    self.failures.add(record.scoring)
            elif isinstance(record, GroupRecord):
                self._handle_group(record, count)
            else:
                self.series.count_samples(new_samples, count=count)  # the step ends with them
                new_samples = []
                self._handle_step(record, count)
        self.series.count_samples(new_samples, count=count)
        if count:
            self.series.count_late(self.collector.late - late_before)

    def _handle_group(self, record: GroupRecord, count: bool) -> None:
        if self.collector.add_group(record) is not Arrival.new:
            return
        if count:
            self.series.count_group(record, self.collector.samples_of(record.group))
        else:
            self.series.show_group(record)

    def _handle_step(self, record: StepRecord, count: bool) -> None:
        closed = self.collector.add_step(record, again=not count)
        if closed is None:
            return
        self.failures = FailureCounts()
        if count:
            slowest = next(iter(closed.slowest), None)
            self.series.count_step(closed.record, records_missing=closed.records_missing, slowest=slowest)
            if self._closed is not None and (samples := self.kept.samples(record.step)) is not None:
                self._closed(closed.record, samples)
        else:
            self.series.restore_steps([closed.record])

    def heard(self) -> None:
        """Record that Redis responded; a whole snapshot of a slow one takes seconds."""
        self.observed_s = time.monotonic()

    def observe(self, snapshot: RunSnapshot) -> None:
        """Add a new snapshot of streams, workers and Redis."""
        self.snapshot = snapshot
        self.heard()
        self.queues.add(snapshot)
        self.series.show_snapshot(snapshot)
