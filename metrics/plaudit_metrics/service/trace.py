"""Write a step's timeline in Chrome's trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A worker is a process, each of its slots a track: samples that a worker held at the same time have separate tracks.
Each stage of a sample is a slice. Waits in queues belong to no worker and are under ``queues``; groups and the
trainer (the step, its waits inside it) have tracks too. A conversation is one slice with its turns inside; its tool
calls, which may run at the same time, are under its worker's tools. An arrow leads from the end of a sample's work to
its group, and one from each group to the trainer.

Format: "Trace Event Format" by the Chromium project; times are microseconds since the first of it (in
asynchronous schedules some samples were admitted before the step was opened). Perfetto counts in whole nanoseconds and
takes a slice that begins before its neighbour ended for its child, so ends are rounded, not lengths. An arrow has an
id of its own, one start and one end, and both lie inside a slice: of an id that is started twice, the second arrow is
dropped.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from plaudit_metrics.statistics.columns import turns_began
from plaudit_metrics.statistics.stages import stages_of
from plaudit_wire.records import GroupRecord, SampleRecord, StepRecord, TurnRecord

_QUEUES = "queues"
_GROUPS = "groups"
_TRAINER = "trainer"
_FIRST = (_TRAINER, _GROUPS)
"""Shown at the top; workers follow in order of appearance, queues are last."""
_STRETCHES: tuple[tuple[tuple[str, ...], Callable[[SampleRecord], str]], ...] = (
    (("rollout_queue",), lambda sample: _QUEUES),
    (
        ("sandboxes", "engine_queue", "generation", "tools"),
        lambda sample: sample.generation.worker if sample.generation else "",
    ),
    (("sample_queue", "redelivery"), lambda sample: _QUEUES),
    (("limiter", "retry", "score", "commit"), lambda sample: sample.scoring.worker),
)
"""A sample's stages in order, split where it changes tracks, with the owner of each track."""
Event = dict[str, Any]
_Place = tuple[int, int]
"""Process and track."""


@dataclass(frozen=True)
class _Stretch:
    """Hold consecutive slices on one track."""

    worker: str
    start: float
    slices: tuple[tuple[str, float], ...]
    """Name and seconds of each."""
    about: dict[str, Any]
    inside: tuple[_Stretch, ...] = ()
    """Slices that lie on top of this one's."""

    @property
    def end(self) -> float:
        return self.start + sum(seconds for _, seconds in self.slices)


@dataclass(frozen=True)
class _Arrow:
    """Connect one stretch to another."""

    source: _Stretch
    target: _Stretch
    moment: float


@dataclass
class _Tracks:
    """Assign processes and tracks: a stretch gets the first free track of its worker."""

    processes: dict[str, int] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)
    _free: dict[str, list[int]] = field(default_factory=dict)
    _busy: dict[str, list[tuple[float, int]]] = field(default_factory=dict)

    def place(self, stretch: _Stretch) -> _Place:
        """Return the process and track of a stretch; call it in the order of their starts."""
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
    """Return the timeline of one step and some of its samples; a group without a record has no slice and no arrows."""
    trainer = _trainer_stretch(record)
    of_groups = {group.group: _group_stretch(group) for group in groups}
    of_samples = [list(_sample_stretches(sample)) for sample in samples]
    calls = chain.from_iterable(map(_call_stretches, samples))
    stretches = sorted([trainer, *of_groups.values(), *chain(*of_samples), *calls], key=lambda stretch: stretch.start)
    origin = stretches[0].start
    tracks = _Tracks()
    places = {id(stretch): tracks.place(stretch) for stretch in stretches}
    arrows = [
        *(
            _Arrow(of_sample[-1], of_groups[sample.group], of_sample[-1].end)
            for sample, of_sample in zip(samples, of_samples, strict=True)
            if of_sample and sample.group in of_groups
        ),
        *(_Arrow(of_groups[group.group], trainer, group.taken) for group in groups if group.taken is not None),
    ]
    events = [
        *(event for stretch in stretches for event in _slices(stretch, places[id(stretch)], origin)),
        *(event for number, arrow in enumerate(arrows) for event in _ends(arrow, number, places, origin)),
    ]
    return {
        "displayTimeUnit": "ms",
        "otherData": {"step": record.step, "incarnation": record.incarnation, "verdict": record.verdict},
        "traceEvents": [*_names(tracks), *sorted(events, key=lambda event: float(event["ts"]))],
    }


def _trainer_stretch(record: StepRecord) -> _Stretch:
    """Return the step with its waits inside (cut to the step, since slices must nest)."""
    about = {"step": record.step, "verdict": record.verdict}
    waits = []
    for wait in record.waits:
        start, end = max(wait.start, record.opened), min(wait.end, record.closed)
        if end > start:
            waits.append(_Stretch(_TRAINER, start, (("wait", end - start),), {"awaited": len(wait.awaited)}))
    span = max(record.closed - record.opened, 0.0)
    return _Stretch(_TRAINER, record.opened, ((f"step {record.step}", span),), about, inside=tuple(waits))


def _group_stretch(group: GroupRecord) -> _Stretch:
    """Return the time of a group after all its samples were terminal; a group that was never complete has none."""
    terminal = group.terminal or group.closed
    ready = max(group.ready or terminal, terminal)
    taken = max(group.taken or ready, ready)
    slices = (("group_scorer", ready - terminal), ("ready_queue", taken - ready))
    about = {"group": group.group, "end": group.end, "reason": group.reason}
    return _Stretch(_GROUPS, terminal, slices, about)


def _sample_stretches(sample: SampleRecord) -> Iterable[_Stretch]:
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
            stretch = _Stretch(worker_of(sample) or _QUEUES, now, slices, about)
            if "tools" in stages and sample.generation is not None and sample.generation.turns:
                stretch = _conversation(stretch, sample, sample.generation.turns)
            yield stretch
            now = stretch.end


def _conversation(stretch: _Stretch, sample: SampleRecord, turns: Sequence[TurnRecord]) -> _Stretch:
    """Return a sample's work in a rollout as one slice with its turns inside (cut to it, since slices must nest)."""
    began, ended = turns_began(sample), stretch.start
    inside = list(_machine(stretch, sample, began))
    for number, turn in enumerate(turns, 1):
        start = min(max(began + turn.started_s, ended), stretch.end)
        ended = min(max(began + turn.started_s + turn.generate_s, start), stretch.end)
        about = {"tokens": turn.tokens, "engine_queue_s": turn.engine_queue_s, "calls": len(turn.calls)}
        inside.append(_Stretch(stretch.worker, start, ((f"turn {number}", ended - start),), about))
    stages = {f"{stage}_s": seconds for stage, seconds in stretch.slices}
    whole = (("conversation", stretch.end - stretch.start),)
    return replace(stretch, slices=whole, about=stretch.about | stages, inside=tuple(inside))


def _machine(stretch: _Stretch, sample: SampleRecord, began: float) -> Iterable[_Stretch]:
    """Yield the wait of a sample for its machine, and the machine's start, before its first turn."""
    machine = sample.generation.sandbox if sample.generation is not None else None
    if machine is None:
        return
    starts = began + machine.claim_s
    for name, start, end in (("claim", began, starts), ("start", starts, starts + machine.start_s)):
        start, end = (min(max(point, stretch.start), stretch.end) for point in (start, end))
        about = {"commands": machine.num_commands, "exec_s": machine.exec_s, "wait_s": machine.wait_s}
        yield _Stretch(stretch.worker, start, ((f"machine {name}", end - start),), about)


def _call_stretches(sample: SampleRecord) -> Iterable[_Stretch]:
    """Return a sample's tool calls. They may overlap, so they have tracks of their own."""
    if sample.generation is None:
        return
    began = turns_began(sample)
    for number, turn in enumerate(sample.generation.turns, 1):
        for call in turn.calls:
            about = {
                "group": sample.group,
                "index": sample.index,
                "turn": number,
                "outcome": call.outcome,
                "wait_s": call.wait_s,
            }
            start = max(began + call.started_s, sample.stamps.admitted)
            yield _Stretch(f"{sample.generation.worker} tools", start, ((call.tool or "unknown", call.call_s),), about)


def _slices(stretch: _Stretch, place: _Place, origin: float) -> Iterable[Event]:
    process, track = place
    now = stretch.start
    for name, seconds in stretch.slices:
        start, end = _nanoseconds(now - origin), _nanoseconds(now + seconds - origin)
        span = {"ts": start / 1000, "dur": (end - start) / 1000}
        yield {"ph": "X", "name": name, "cat": "plaudit", "args": stretch.about, **span, "pid": process, "tid": track}
        now += seconds
    for inner in stretch.inside:
        yield from _slices(inner, place, origin)


def _ends(arrow: _Arrow, number: int, places: Mapping[int, _Place], origin: float) -> Iterable[Event]:
    """Yield both ends of an arrow, or nothing if it would point back in time."""
    flow = {"name": "group", "cat": "flow", "id": number}
    leaves = _inside(arrow.source, arrow.moment, origin, before=1)
    arrives = _inside(arrow.target, arrow.moment, origin)
    if arrives < leaves:
        return
    for phase, moment, stretch in (("s", leaves, arrow.source), ("f", arrives, arrow.target)):
        process, track = places[id(stretch)]
        event = {"ph": phase, **flow, "ts": moment / 1000, "pid": process, "tid": track}
        yield event | {"bp": "e"} if phase == "f" else event


def _inside(stretch: _Stretch, moment: float, origin: float, before: int = 0) -> int:
    """Return a point in time in nanoseconds, moved into the stretch if it is outside."""
    start, end = _nanoseconds(stretch.start - origin), _nanoseconds(stretch.end - origin)
    return max(min(_nanoseconds(moment - origin), end) - before, start)


def _names(tracks: _Tracks) -> Iterable[Event]:
    for worker, process in tracks.processes.items():
        order = _FIRST.index(worker) if worker in _FIRST else len(_FIRST) + process
        if worker == _QUEUES:
            order = len(_FIRST) + len(tracks.processes) + 1
        yield _about(process, 0, "process_name", {"name": worker})
        yield _about(process, 0, "process_sort_index", {"sort_index": order})
        for track in range(1, tracks.used[worker] + 1):
            yield _about(process, track, "thread_name", {"name": f"slot {track}"})


def _about(process: int, track: int, name: str, arguments: dict[str, Any]) -> Event:
    return {"ph": "M", "name": name, "pid": process, "tid": track, "ts": 0, "args": arguments}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
