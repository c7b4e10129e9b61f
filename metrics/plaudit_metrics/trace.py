"""A step as a timeline in Chrome's trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process a worker, one track a slot of it: samples that a worker held at the same time lie in tracks of their own.
Every stage of a sample is a slice. Waiting in a queue belongs to no worker and lies under ``queues``; groups and the
trainer (the step, its waits) have tracks too. An arrow leads from a sample's score to its group and on to the trainer.

Format: "Trace Event Format" by the Chromium project; times are microseconds since the first of it (in
asynchronous schedules some samples were admitted before the step was opened).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plaudit_metrics.records import GroupRecord, SampleRecord, StepRecord
from plaudit_metrics.stages import stages_of

_QUEUES = "queues"
_GROUPS = "groups"
_TRAINER = "trainer"

_STRETCHES: tuple[tuple[tuple[str, ...], Callable[[SampleRecord], str]], ...] = (
    (("rollout_queue",), lambda sample: _QUEUES),
    (("engine_queue", "generation", "tools"), lambda sample: sample.generation.worker if sample.generation else ""),
    (("sample_queue", "redelivery"), lambda sample: _QUEUES),
    (("limiter", "retry", "score", "commit"), lambda sample: sample.scoring.worker),
)
"""A sample's stages in order, cut where it goes from one track to the next, and whose track that is."""

Event = dict[str, Any]


@dataclass(frozen=True)
class _Stretch:
    """What happened on one track without a break: consecutive slices."""

    worker: str
    start: float
    slices: tuple[tuple[str, float], ...]
    """Name and seconds of each."""
    about: dict[str, Any]
    flow: int | None = None
    """Number of the arrow that leaves from its end."""

    @property
    def end(self) -> float:
        return self.start + sum(seconds for _, seconds in self.slices)


@dataclass
class _Tracks:
    """Numbers for processes and tracks: a stretch gets the first track of its worker that is free."""

    processes: dict[str, int] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)
    _free: dict[str, list[int]] = field(default_factory=dict)
    _busy: dict[str, list[tuple[float, int]]] = field(default_factory=dict)

    def place(self, stretch: _Stretch) -> tuple[int, int]:
        """Process and track; stretches must come in the order of their starts."""
        worker = stretch.worker
        process = self.processes.setdefault(worker, len(self.processes) + 1)
        free, busy = self._free.setdefault(worker, []), self._busy.setdefault(worker, [])
        while busy and busy[0][0] <= stretch.start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            track = heapq.heappop(free)
        else:
            track = self.used[worker] = self.used.get(worker, 0) + 1
        heapq.heappush(busy, (stretch.end, track))
        return process, track


def chrome_trace(record: StepRecord, samples: Sequence[SampleRecord], groups: Sequence[GroupRecord]) -> dict[str, Any]:
    """Draws one step.

    Args:
        record: the step.
        samples: those of its samples that are to be drawn.
        groups: the records of their groups; without its record a group has no slice and its samples no arrow.

    Returns:
        The object to be written as JSON: ``{"traceEvents": [...], …}``.
    """
    by_id = {group.group: number for number, group in enumerate(groups)}
    stretches = [
        *_trainer_stretches(record),
        *(_group_stretch(group, number) for group, number in zip(groups, by_id.values(), strict=True)),
    ]
    for sample in samples:
        stretches += _sample_stretches(sample, by_id.get(sample.group))
    stretches.sort(key=lambda stretch: stretch.start)
    origin = stretches[0].start
    tracks, events = _Tracks(), list[Event]()
    for stretch in stretches:
        process, track = tracks.place(stretch)
        events += _slices(stretch, process, track, origin)
    events += _arrows_to_trainer(groups, by_id, tracks.processes[_TRAINER], origin)
    return {
        "displayTimeUnit": "ms",
        "otherData": {"step": record.step, "incarnation": record.incarnation, "verdict": record.verdict},
        "traceEvents": [*_names(tracks), *sorted(events, key=lambda event: float(event["ts"]))],
    }


def _trainer_stretches(record: StepRecord) -> Iterable[_Stretch]:
    about = {"step": record.step, "verdict": record.verdict}
    yield _Stretch(_TRAINER, record.opened, ((f"step {record.step}", record.closed - record.opened),), about)
    for wait in record.waits:
        yield _Stretch(_TRAINER, wait.start, (("wait", wait.end - wait.start),), {"awaited": len(wait.awaited)})


def _group_stretch(group: GroupRecord, number: int) -> _Stretch:
    """From the moment its samples were all terminal; a group that was never complete has a slice of no length."""
    terminal = group.terminal or group.closed
    ready = max(group.ready or terminal, terminal)
    taken = max(group.taken or ready, ready)
    slices = (("group_scorer", ready - terminal), ("ready_queue", taken - ready))
    about = {"group": group.group, "end": group.end, "reason": group.reason}
    return _Stretch(_GROUPS, terminal, slices, about, flow=number)


def _sample_stretches(sample: SampleRecord, group: int | None) -> Iterable[_Stretch]:
    seconds = stages_of(sample)
    about = {
        "group": sample.group,
        "index": sample.index,
        "outcome": sample.scoring.outcome,
        "value": sample.scoring.value,
        "deliveries": sample.deliveries,
    }
    now = sample.stamps.admitted
    for stages, worker_of in _STRETCHES:
        slices = tuple((stage, seconds[stage]) for stage in stages if stage in seconds)
        if slices:
            scored = group if "score" in stages else None
            stretch = _Stretch(worker_of(sample) or _QUEUES, now, slices, about, flow=scored)
            yield stretch
            now = stretch.end


def _slices(stretch: _Stretch, process: int, track: int, origin: float) -> Iterable[Event]:
    where = {"pid": process, "tid": track}
    now = stretch.start
    for name, seconds in stretch.slices:
        span = {"ts": _microseconds(now - origin), "dur": _microseconds(seconds)}
        yield {"ph": "X", "name": name, "cat": "plaudit", "args": stretch.about, **span, **where}
        now += seconds
    if stretch.flow is not None:
        begins = "t" if stretch.worker == _GROUPS else "s"
        moment = _microseconds((stretch.start if begins == "t" else now) - origin)
        yield {"ph": begins, "name": "group", "cat": "flow", "id": stretch.flow, "ts": moment, **where}


def _arrows_to_trainer(
    groups: Sequence[GroupRecord], numbers: Mapping[str, int], trainer: int, origin: float
) -> Iterable[Event]:
    """Ends each group's arrow at the step's slice (the trainer's first track), when the trainer took the group."""
    for group in groups:
        if group.taken is not None:
            flow = {"ph": "f", "bp": "e", "name": "group", "cat": "flow", "id": numbers[group.group]}
            yield flow | {"ts": _microseconds(group.taken - origin), "pid": trainer, "tid": 1}


def _names(tracks: _Tracks) -> Iterable[Event]:
    for worker, process in tracks.processes.items():
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "ts": 0, "args": {"name": worker}}
        for track in range(1, tracks.used[worker] + 1):
            about = {"name": f"slot {track}"}
            yield {"ph": "M", "name": "thread_name", "pid": process, "tid": track, "ts": 0, "args": about}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
