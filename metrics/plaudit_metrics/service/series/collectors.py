"""The parts that the series are made of: families as they are scraped, means of newest values, names in exemplars."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from plaudit_metrics.monitoring.rules import (
    DOUBT,
    DOUBT_OF_A_LOOK,
    DOUBT_OF_FEW,
    ENOUGH_SAMPLES,
    EVIDENCE_STEPS,
    FEW_SAMPLES,
    IDLE_S,
    LEAST_SAMPLES,
    MOST_SAMPLES,
    RECENT_S,
)
from plaudit_metrics.statistics.columns import SANDBOX_STAGES, Integers, SandboxColumns, ToolCalls, tool_name
from plaudit_metrics.statistics.stages import BatchHistogram
from plaudit_wire.logs import drawn, sample_ids
from plaudit_wire.records import CallOutcome, EngineStatus, SampleRecord

Labelled = Mapping[tuple[str, ...], float | None]
"""Label values → value; None: the series is absent."""


class CopiedCounts:
    """Hold the values of a counter that is kept elsewhere: in Redis, by label values."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], float] = {}
        self._last: dict[tuple[str, ...], float] = {}
        self._ahead: dict[tuple[str, ...], float] = {}
        """What Redis has lost since this process started."""

    def copy(self, values: Mapping[tuple[str, ...], float]) -> None:
        """Copy values, by label values; others keep theirs.

        A value below the last one is a Redis that came back with an older state. It is not shown, because Prometheus
        would take it for a counter that began at 0 again, and count everything a second time.
        """
        for labels, value in values.items():
            lost = self._last.get(labels, 0.0) - value
            if lost > 0:
                self._ahead[labels] = self._ahead.get(labels, 0.0) + lost
            self._last[labels] = value
            self.values[labels] = value + self._ahead.get(labels, 0.0)


def counter_family(
    name: str, documentation: str, labels: Sequence[str], values: Mapping[tuple[str, ...], float]
) -> CounterMetricFamily:
    """Return a family of counters as it is scraped; ``name`` is without ``_total``."""
    family = CounterMetricFamily(name, documentation, labels=labels)
    for of, value in sorted(values.items()):
        family.add_metric(of, value)
    return family


def gauge_family(name: str, documentation: str, labels: Sequence[str], values: Labelled) -> GaugeMetricFamily:
    """Return a family of gauges as it is scraped."""
    family = GaugeMetricFamily(name, documentation, labels=labels)
    for of, value in sorted(values.items()):
        if value is not None:
            family.add_metric(of, float(value))
    return family


class RecentWindow:
    """Say which samples are recent: those of a whole step, or of a service those of a quarter of an hour.

    The slow and the failed samples of a step end last. So any part of a step is a biased sample of it, and a rate over
    a window of time is undefined between two steps that are further apart. While the first step is open, all its
    samples are recent. Without steps, the quarter of an hour ends with the newest sample, so that a pause does not
    change the figure; a service that has been idle for longer has none, and begins anew with its next sample.
    """

    def __init__(self, *, has_steps: bool, most: int | None = MOST_SAMPLES, idle_s: float = IDLE_S) -> None:
        self._has_steps = has_steps
        self._size = None if has_steps else most
        self._idle_s = idle_s
        self._samples = self._idle_before = 0
        self._newest = self._now = 0.0

    def add(self, samples: int, at: float) -> tuple[int, float]:
        """Count samples that ended then (seconds since the epoch); return their place for ``is_recent``."""
        if not self._has_steps and at - self._newest > self._idle_s:
            self._idle_before = self._samples
        self._samples += samples
        self._newest = max(self._newest, at)
        return self._samples, at

    def close_step(self, samples: int) -> None:
        """Note the samples of a step that has closed; of small steps several together are recent."""
        if self._has_steps and samples > 0:
            self._size = samples * -(-FEW_SAMPLES // samples)

    def show_time(self, now: float) -> None:
        """Note that it is now this late, by the clock of the samples' stamps."""
        self._now = max(self._now, now)

    @property
    def is_idle(self) -> bool:
        """Return True when no sample is recent, because there are no steps and the newest is too old."""
        return not self._has_steps and self._now - self._newest > self._idle_s

    @property
    def whole_steps(self) -> int:
        """Return the samples of the smallest stretch that is no biased sample; while the first step is open, all."""
        if not self._has_steps:
            return FEW_SAMPLES
        return self._size or max(self._samples, 1)

    def age(self, place: tuple[int, float]) -> int:
        """Return how many samples ended after those of this place."""
        return self._samples - place[0]

    def is_evidence(self, place: tuple[int, float]) -> bool:
        """Return True if the samples of this place may still tell what is to be expected of the next ones."""
        if place[1] >= self._newest - RECENT_S:
            return True
        steps = EVIDENCE_STEPS if self._has_steps else 1  # few samples an hour are all that tells of a quiet service
        return place[0] > self._idle_before and self.age(place) < steps * self.whole_steps

    def holds(self, place: tuple[int, float], newer: int) -> bool:
        """Return True if the samples of this place are recent; ``newer`` are the values that came after them."""
        number, at = place
        if number <= self._idle_before or (self._size is not None and number <= self._samples - self._size):
            return False
        return self._has_steps or at >= self._newest - RECENT_S or newer < LEAST_SAMPLES


class RecentMean:
    """Compute the mean of the recent values; fewer than ``LEAST_SAMPLES`` have none. Batches are dropped whole."""

    def __init__(self, window: RecentWindow) -> None:
        self._window = window
        self._batches: deque[tuple[tuple[int, float], float, int]] = deque()
        self._total = 0.0
        self._count = 0

    def add(self, total: float, count: int, place: tuple[int, float]) -> None:
        """Add a batch: the sum and the number of its values, and their place in the window."""
        if count > 0:
            self._batches.append((place, total, count))
            self._total += total
            self._count += count
        self._drop()

    def _drop(self) -> None:
        while self._batches:
            place, total, count = self._batches[0]
            if self._window.holds(place, self._count - count):
                return
            self._batches.popleft()
            self._total -= total
            self._count -= count

    @property
    def mean(self) -> float | None:
        """Return the mean; None with too few values."""
        self._drop()
        if self._window.is_idle or self._count < LEAST_SAMPLES:
            return None
        return max(self._total, 0.0) / self._count


def share_bound(hits: float, count: int, *, doubt: float, upper: bool = False) -> float:
    """Return a one-sided confidence bound of a share of which ``hits`` of ``count`` were seen.

    Chernoff's inequality: of all shares as far away, chance alone gives such counts with a probability of at most
    ``exp(-doubt)``, for any count. Without values nothing is known: 0 or 1.
    """
    if count <= 0:
        return float(upper)
    seen = min(max(hits / count, 0.0), 1.0)
    near, far = seen, float(upper)
    for _ in range(_BISECTIONS):
        share = (near + far) / 2
        near, far = (share, far) if count * _divergence(seen, share) <= doubt else (near, share)
    return near


_BISECTIONS = 30


def _divergence(seen: float, share: float) -> float:
    """Return the Kullback-Leibler divergence of two Bernoulli distributions; ``share`` is neither 0 nor 1."""
    hit = seen * math.log(seen / share) if seen > 0 else 0.0
    return hit + ((1 - seen) * math.log((1 - seen) / (1 - share)) if seen < 1 else 0.0)


class RecentLow:
    """Compute the share that recent values have at least: what chance alone does not explain.

    A step of 16 or 64 samples says little, so the newest 1, 2, 4 … steps are looked at together, as far back as newer
    ones do not contradict: after a repair an outage ends to count with the first steps that show it.
    """

    def __init__(self, window: RecentWindow, least: int = 1) -> None:
        self._window = window
        self._least = least
        """Fewer values than this say nothing."""
        self._batches: deque[tuple[tuple[int, float], float, int]] = deque()

    def add(self, total: float, count: int, place: tuple[int, float]) -> None:
        """Add a batch: the sum and the number of its values, and their place in the window."""
        if count > 0:
            self._batches.append((place, total, count))
        while self._batches and not self._window.is_evidence(self._batches[0][0]):
            self._batches.popleft()

    @property
    def share(self) -> float | None:
        """Return the share; None without enough values."""
        if self._window.is_idle:
            return None
        found, agreed = None, 1.0
        for look, (total, count) in enumerate(self._sums()):
            if count >= self._least:
                doubt = DOUBT + look * DOUBT_OF_A_LOOK + (DOUBT_OF_FEW if count < ENOUGH_SAMPLES else 0.0)
                found = max(found or 0.0, min(share_bound(total, count, doubt=doubt), agreed))
                agreed = min(agreed, share_bound(total, count, upper=True, doubt=_CONTRADICTS))
        return found

    def _sums(self) -> Iterator[tuple[float, int]]:
        """Yield the sum and the number of the values of the newest 1, 2, 4 … steps."""
        size, total, count = self._window.whole_steps, 0.0, 0
        for place, of_batch, in_batch in reversed(self._batches):
            while self._window.age(place) >= size:
                yield total, count
                size *= 2
            total, count = total + of_batch, count + in_batch
        yield total, count


_CONTRADICTS = 1.35
"""The newer steps are from a smaller share with a probability of about 95 %."""


class RecentMeans(Collector):
    """Expose the means of the recent values by label values; those of too few are absent.

    With ``low``, another family is the share that they have at least (``RecentLow``), of at least so many values.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str],
        window: RecentWindow,
        registry: CollectorRegistry,
        low: tuple[str, int] | None = None,
    ) -> None:
        self._family = (name, documentation, labels)
        self._low = low
        self._window = window
        self._means: dict[tuple[str, ...], RecentMean] = {}
        self._lows: dict[tuple[str, ...], RecentLow] = {}
        registry.register(self)

    def add(self, total: float, count: int, place: tuple[int, float], *labels: str) -> None:
        """Add a batch: the sum and the number of its values, and their place in the window."""
        self._means.setdefault(labels, RecentMean(self._window)).add(total, count, place)
        if self._low is not None:
            self._lows.setdefault(labels, RecentLow(self._window, self._low[1])).add(total, count, place)

    def forget(self) -> None:
        """Forget all values."""
        self._means.clear()
        self._lows.clear()

    def keep(self, names: Collection[str]) -> None:
        """Forget the values whose first label is not among these names."""
        for labels in [labels for labels in self._means if labels[0] not in names]:
            del self._means[labels]
            self._lows.pop(labels, None)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the families as they are scraped."""
        name, documentation, names = self._family
        yield gauge_family(name, documentation, names, {labels: recent.mean for labels, recent in self._means.items()})
        if self._low is not None:
            certain = f"{documentation}; at least so much, whatever chance does"
            shares = {labels: recent.share for labels, recent in self._lows.items()}
            yield gauge_family(self._low[0], certain, names, shares)

    describe = collect


_MOST_CHARACTERS = 64
"""Of a group's id: Prometheus refuses an exemplar whose labels have over 128 characters."""


@dataclass(frozen=True)
class Naming:
    """Name the samples of a run behind the buckets of latency histograms, as OpenMetrics exemplars.

    An exemplar has the sample's ``group`` and ``index``, and its ``trace_id`` where traces are sent. It then names only
    samples whose traces are sent, so that every link leads to a trace.
    """

    run: str = ""
    share: float | None = None
    """Share of the samples whose traces are sent; None: no traces are sent."""

    def among(self, samples: Sequence[SampleRecord]) -> NamedSamples:
        """Return the samples for exemplars. Where traces are sent, those that are drawn: validation has none."""
        share = self.share
        if share is None:
            return NamedSamples(self, samples, np.ones(len(samples), dtype=np.bool_))
        traced = [each.split == "train" and drawn(self.run, each.group, each.index, share) for each in samples]
        return NamedSamples(self, samples, np.array(traced, dtype=np.bool_))

    def labels(self, sample: SampleRecord) -> dict[str, str]:
        """Return the labels of an exemplar."""
        labels: dict[str, str] = {}
        if len(sample.group) <= _MOST_CHARACTERS:
            labels |= {"group": sample.group, "index": str(sample.index)}
        if self.share is not None:
            trace_id, _ = sample_ids(self.run, sample.group, sample.index)
            labels["trace_id"] = f"{trace_id:032x}"
        return labels


UNTRACED = Naming()
"""Names samples by group and index alone."""


class NamedSamples:
    """Name the samples behind an array of values, in its order, where ``eligible`` (of the same shape) is True.

    Exemplars are of the time ``at`` (seconds since the epoch); None: when each sample became terminal.
    """

    def __init__(
        self, naming: Naming, samples: Sequence[SampleRecord], eligible: NDArray[np.bool_], at: float | None = None
    ) -> None:
        self.eligible = eligible
        self._naming = naming
        self._samples = samples
        self._at = at

    def take(self, places: Integers) -> NamedSamples:
        """Return the samples at these places."""
        samples = [self._samples[place] for place in places.tolist()]
        return NamedSamples(self._naming, samples, self.eligible[places], self._at)

    def exemplar(self, place: int, value: float) -> Exemplar:
        """Return the exemplar of the sample at a place."""
        sample = self._samples[place]
        at = self._at or sample.stamps.committed or sample.stamps.admitted
        return Exemplar(self._naming.labels(sample), value, at)


def engine_gauges(engines: Sequence[EngineStatus]) -> Iterator[GaugeMetricFamily]:
    """Yield the gauges of the live rollouts' engines, without values if there are none."""
    running, waiting = (sum(getattr(engine, state) for engine in engines) for state in ("running", "waiting"))
    requests: Labelled = {("running",): running, ("waiting",): waiting} if engines else {}
    yield gauge_family("plaudit_engine_requests", "Requests in the engines of all rollouts", ["state"], requests)
    for name, field, documentation in (
        ("plaudit_engine_kv_cache_ratio", "kv_cache_share", "Share of the engines' key-value cache in use"),
        ("plaudit_engine_first_token_seconds", "first_token_s", "Mean time to the first token of the newest requests"),
    ):
        known = [value for engine in engines if (value := getattr(engine, field)) is not None]
        figures: Labelled = {("mean",): sum(known) / len(known), ("max",): max(known)} if known else {}
        yield gauge_family(name, documentation, ["statistic"], figures)


class SandboxSeries:
    """Count the machines of samples, and the seconds of their stages."""

    def __init__(self, registry: CollectorRegistry, window: RecentWindow) -> None:
        seconds = "Seconds of a sample's machine in a stage"
        self.seconds = BatchHistogram("plaudit_sandbox_seconds", seconds, ["stage"], registry)
        made = "Machines of samples, by whether they could be made and did not break"
        self.machines = Counter("plaudit_sandbox_machines", made, ["result"], registry=registry)
        failed = "Share of the recent machines that could not be made, or broke"
        low = ("plaudit_sandbox_recent_failed_low_ratio", LEAST_SAMPLES)
        self._recent_failed = RecentMeans("plaudit_sandbox_recent_failed_ratio", failed, [], window, registry, low)
        self._begun = False

    def count(self, machines: SandboxColumns) -> None:
        """Count the machines of a batch of samples."""
        for stage, seconds in machines.seconds().items() if len(machines) else ():
            self.seconds.observe(seconds, stage)
        failed = int(machines.failed.sum())
        for result, number in (("failed", failed), ("ok", len(machines) - failed)) if len(machines) else ():
            self.machines.labels(result).inc(number)

    def remember(self, machines: SandboxColumns, place: tuple[int, float]) -> None:
        """Update the share among the recent machines; call it before ``count``."""
        if len(machines) and not self._begun:  # a job without machines has no such series
            self._begun = True
            for stage in SANDBOX_STAGES:
                self.seconds.begin(stage)
            for result in ("ok", "failed"):
                self.machines.labels(result)
        self._recent_failed.add(float(machines.failed.sum()), len(machines), place)

    def forget(self) -> None:
        """Forget the recent machines."""
        self._recent_failed.forget()


_FAILED = ("error", "timeout", "killed")
"""A refused call is the policy's mistake or a limit of the job: the tool was never run."""


class ToolSeries:
    """Count the calls of tools. Names beyond ``MOST_TOOLS`` count as ``unknown``."""

    def __init__(self, registry: CollectorRegistry, window: RecentWindow) -> None:
        self._names: set[str] = set()
        seconds = "Seconds of a tool's calls, refused ones excluded"
        self.call_seconds = BatchHistogram("plaudit_tool_call_seconds", seconds, ["tool"], registry)
        ends = "Calls of a tool, by how they ended"
        self.calls = Counter("plaudit_tool_calls", ends, ["tool", "outcome"], registry=registry)
        failed = "Share of a tool's recent calls that raised, timed out or lost their process"
        self._recent_failed = RecentMeans("plaudit_tool_recent_failed_ratio", failed, ["tool"], window, registry)

    def count(self, tools: Mapping[str, ToolCalls]) -> None:
        """Count the calls of a batch of samples."""
        for given, calls in tools.items():
            name = tool_name(given, self._names)
            self.call_seconds.observe(np.array(calls.run_s), name)
            for outcome, number in calls.outcomes.items():
                self.calls.labels(name, outcome).inc(number)

    def remember(self, tools: Mapping[str, ToolCalls], place: tuple[int, float]) -> None:
        """Update the shares among the recent calls; call it before ``count``."""
        for given, calls in tools.items():
            name = tool_name(given, self._names)
            self._know(name)
            failed = sum(calls.outcomes[outcome] for outcome in _FAILED)
            self._recent_failed.add(float(failed), len(calls.run_s), place, name)

    def _know(self, name: str) -> None:
        """Begin the tool's counters at 0."""
        if name not in self._names:
            self._names.add(name)
            self.call_seconds.begin(name)
            for outcome in get_args(CallOutcome):
                self.calls.labels(name, outcome)

    def forget(self) -> None:
        """Forget the recent calls."""
        self._recent_failed.forget()
