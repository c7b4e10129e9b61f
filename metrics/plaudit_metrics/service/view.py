"""Hold the state of a run as the service knows it: fed with records, read by the API and the scrapes."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from plaudit_metrics.service.series.run import RunSeries
from plaudit_metrics.sources.snapshot import QueueHistory, RunSnapshot
from plaudit_metrics.sources.steps import Arrival, Collector, EncodedStep, KeptSteps
from plaudit_metrics.sources.stream import EventRecord
from plaudit_metrics.statistics.columns import FailureCounts
from plaudit_metrics.statistics.integrity import WINDOW_STEPS
from plaudit_wire.records import GROUP_ENDED, NO_STEP, GroupRecord, SampleRecord, StepRecord


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
        self._heard_s = time.monotonic()
        self._asked_s: float | None = None
        """When the oldest question was asked to which Redis has not responded (monotonic)."""
        self._outage = (0.0, 0.0)
        """Seconds of the newest outage of Redis, and when it ended (monotonic)."""
        self.queues = QueueHistory()
        self.failures = FailureCounts()
        """Of the samples that ended since the newest step closed."""
        self.service = ServiceSamples()
        """Samples that belong to no step."""

    def restore(self, records: Sequence[StepRecord]) -> None:
        """Add the steps of ``steps.jsonl``, which are shown but not counted."""
        self.kept.restore(records)
        self.series.restore_steps(step.record for step in self.kept.newest(WINDOW_STEPS))

    def handle(self, records: list[EventRecord], count: bool) -> None:
        """Add a batch of event records; ``count`` is False for those that an earlier start counted."""
        new_samples: list[SampleRecord] = []
        late_before = self.collector.late
        for record in records:
            if isinstance(record, SampleRecord):
                if record.step == NO_STEP or self.collector.add_sample(record) is Arrival.new:
                    new_samples.append(record)
                    if record.scoring.reason != GROUP_ENDED:
                        self.failures.add(record.scoring)
                if record.step == NO_STEP:
                    self.service.add(record)
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

    def asked(self) -> None:
        """Record that Redis is asked whether it responds."""
        if self._asked_s is None:
            self._asked_s = time.monotonic()

    def heard(self) -> None:
        """Record that Redis responded; a whole snapshot of a slow one takes seconds."""
        self._heard_s = time.monotonic()
        if self.unheard_s > _OUTAGE_S:
            self._outage = (self.unheard_s, self._heard_s)
        self._asked_s = None

    @property
    def unheard_s(self) -> float:
        """Return for how long Redis has not responded to a question; 0 while none is open."""
        return 0.0 if self._asked_s is None else time.monotonic() - self._asked_s

    @property
    def age_s(self) -> float:
        """Return the seconds since the newest snapshot."""
        return time.monotonic() - (self.snapshot.taken or self._heard_s)

    def observe(self, snapshot: RunSnapshot) -> None:
        """Add a new snapshot of streams, workers and Redis."""
        outage_s, ended_s = self._outage
        snapshot = snapshot.without_outage(outage_s, time.monotonic() - ended_s)
        self.snapshot = snapshot
        self.heard()
        self.queues.add(snapshot)
        self.series.show_snapshot(snapshot)


_OUTAGE_S = 1.0
_KEPT = 10_000
_MINUTES = 60
_LISTED = 20
_SUBMITTED = "s:"
"""Of the groups that a session submitted: this, the session, a colon, the session's own id."""
_OF_A_GATEWAY = "http."


class ServiceSamples:
    """Keep the newest samples of a scoring service, and how many ended in each of the last minutes."""

    def __init__(self) -> None:
        self._newest: deque[SampleRecord] = deque(maxlen=_KEPT)
        self._minutes: dict[int, Counter[str]] = {}
        self._began: int | None = None
        """The first minute in which a sample ended."""

    def add(self, record: SampleRecord) -> None:
        """Add a sample that ended."""
        self._newest.append(record)
        minute = int((record.stamps.committed or record.stamps.admitted) // 60)
        self._minutes.setdefault(minute, Counter())["scored" if record.scoring.is_scored else "unscored"] += 1
        self._began = minute if self._began is None else min(self._began, minute)
        if len(self._minutes) > _MINUTES:
            del self._minutes[min(self._minutes)]

    def summary(self, now: float) -> dict[str, Any]:
        """Return rate, outcomes, latency by scorer and by caller, and the newest samples, as plain data.

        The rate is of the last hour before ``now`` (of the stamps' clock), the newest samples are the last 20, all else
        is of the newest 10,000 samples.
        """
        return {
            "samples": len(self._newest),
            "minutes": self._rate(int(now // 60)),
            "outcomes": Counter(record.scoring.outcome for record in self._newest),
            "scorers": _by_scorer(self._newest),
            "callers": _by_caller(self._newest),
            "newest": [_listed(record) for record in list(self._newest)[: -_LISTED - 1 : -1]],
        }

    def _rate(self, newest: int) -> list[dict[str, int]]:
        """Return the samples of each minute, also of those in which none ended."""
        if self._began is None:
            return []
        minutes = range(max(self._began, newest - _MINUTES + 1), newest + 1)
        none: Counter[str] = Counter()
        counted = ((minute, self._minutes.get(minute, none)) for minute in minutes)
        return [
            {"time": 60 * minute, "scored": counts["scored"], "unscored": counts["unscored"]}
            for minute, counts in counted
        ]


def _by_scorer(records: Iterable[SampleRecord]) -> list[dict[str, Any]]:
    found: dict[str, list[Any]] = {}
    for record in records:
        for name, scorer in record.scoring.scorers.items():
            found.setdefault(name, []).append(scorer)
    return [
        {
            "scorer": name,
            "outcomes": Counter(scorer.outcome for scorer in scorers),
            "value": _mean(scorer.value for scorer in scorers if scorer.value is not None),
            **_spread([scorer.seconds for scorer in scorers]),
        }
        for name, scorers in sorted(found.items())
    ]


def _by_caller(records: Iterable[SampleRecord]) -> list[dict[str, Any]]:
    """Return what each caller submitted, the one with the most samples first."""
    found: dict[str, list[SampleRecord]] = {}
    for record in records:
        found.setdefault(_caller(record), []).append(record)
    return [
        {
            "caller": caller,
            "samples": len(of_caller),
            "unscored": sum(not record.scoring.is_scored for record in of_caller),
            "newest": max(record.stamps.committed or 0.0 for record in of_caller),
            **_spread([record.wall_s for record in of_caller]),
        }
        for caller, of_caller in sorted(found.items(), key=lambda each: -len(each[1]))
    ]


def _caller(record: SampleRecord) -> str:
    return record.group.removeprefix(_SUBMITTED).partition(":")[0].removeprefix(_OF_A_GATEWAY)


def _listed(record: SampleRecord) -> dict[str, Any]:
    return {
        "caller": _caller(record),
        "id": record.group.removeprefix(_SUBMITTED).partition(":")[2],
        "index": record.index,
        "outcome": record.scoring.outcome,
        "value": record.scoring.value,
        "reason": record.scoring.reason or "",
        "seconds": record.wall_s,
        "worker": record.scoring.worker,
        "time": record.stamps.committed,
    }


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    p50, p95 = np.quantile(np.array(seconds), (0.5, 0.95))
    return {"p50_s": float(p50), "p95_s": float(p95), "max_s": max(seconds)}


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None
