"""Track one child of a pool and its works: which wait, which run, and until when."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from plaudit_reward.isolation.messages import Blocked, Drop, Dropped, Finished, FromChild, LoadFunction, Started, Work
from plaudit_reward.isolation.process import ChildProcess
from plaudit_wire.errors import ScoringError

_AHEAD_S = 0.02
"""Seconds of work that are sent ahead to a child that runs one at a time, so that it never waits for the next."""
_MAX_AHEAD = 128
_FIRST_AHEAD = 4
_WEIGHT_OF_LATEST = 0.1


@dataclass(eq=False)
class PoolCall:
    """One work on its way through a pool."""

    work: Work
    limit_s: float
    answer: asyncio.Future[Finished]
    queued_s: float
    """When the pool received it (monotonic)."""
    waited_s: float = 0.0
    """How long it waited until it last began."""
    began: bool = False
    num_excused: int = 0
    """How often it ran again because the evidence did not show which work ended the child."""
    slot: Slot | None = None

    def fail(self, error: ScoringError) -> None:
        """End it without a result."""
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass(eq=False)
class RunningCall:
    """A call that a child is running."""

    call: PoolCall
    started_s: float
    deadline_s: float
    report: Started
    cancelled: bool = False
    """Its child was asked to cancel it."""


@dataclass
class Pace:
    """Measure how long the works of a pool take (seconds, exponential mean); None before the first result."""

    mean_s: float | None = None

    def add(self, seconds: float) -> None:
        """Add a duration."""
        self.mean_s = seconds if self.mean_s is None else self.mean_s + _WEIGHT_OF_LATEST * (seconds - self.mean_s)

    def ahead(self) -> int:
        """Return how many works to send to a child that runs one at a time."""
        if self.mean_s is None:
            return _FIRST_AHEAD
        return max(1, min(_MAX_AHEAD, math.ceil(_AHEAD_S / max(self.mean_s, 1e-6))))


@dataclass(eq=False)
class Slot:
    """Hold one child process and its works; ``on_exit`` is called when the child ended by itself."""

    name: str
    load: LoadFunction
    on_messages: Callable[[Slot, list[FromChild]], None]
    on_exit: Callable[[Slot, str], None]
    ready: bool = False
    draining: bool = False
    """It gets no more works and is ended when its running ones are done."""
    late: bool = False
    """Its running work takes much longer than usual: it gets no more until that is done."""
    load_until_s: float = math.inf
    idle_since_s: float = math.inf
    waiting: dict[int, PoolCall] = field(default_factory=dict)
    running: dict[int, RunningCall] = field(default_factory=dict)
    taken_back: dict[int, PoolCall] = field(default_factory=dict)
    blocked: Blocked | None = None
    last_message_s: float = 0.0
    """When its last message arrived."""

    def __post_init__(self) -> None:
        self.child = ChildProcess(
            self.name,
            self.load,
            lambda messages: self.on_messages(self, messages),
            lambda how: self.on_exit(self, how),
        )

    @property
    def num_given(self) -> int:
        """Return the number of its works, waiting and running."""
        return len(self.waiting) + len(self.running)

    def give(self, calls: list[PoolCall]) -> None:
        """Send works to the child."""
        for call in calls:
            self.waiting[call.work.id] = call
            call.slot = self
        self.child.send([call.work for call in calls])

    def take_back(self) -> list[PoolCall]:
        """Take back the works that have not begun, in order; ``begin`` returns one that begins all the same."""
        calls = list(self.waiting.values())
        if calls:
            self.taken_back.update(self.waiting)
            self.waiting.clear()
            self.child.send([Drop([call.work.id for call in calls])])
        return calls

    def begin(self, report: Started, now_s: float) -> PoolCall | None:
        """Record that a work began; its limit starts now. Return the call if it had been taken back."""
        overtaken = self.taken_back.pop(report.id, None)
        call = self.waiting.pop(report.id, None) or overtaken
        if call is not None:
            call.waited_s = now_s - call.queued_s
            call.began = True
            self.running[report.id] = RunningCall(call, now_s, now_s + call.limit_s, report)
        return overtaken

    def end(self, report: Finished) -> RunningCall | None:
        """Record that a work ended; return None when no caller waits for it."""
        self.late = False
        return self.running.pop(report.id, None)

    def dropped(self, report: Dropped) -> None:
        """Record that works that were taken back will not begin."""
        for work in report.ids:
            self.taken_back.pop(work, None)

    def forget(self, call: PoolCall) -> None:
        """Drop a call that no caller waits for, and cancel it where that is possible."""
        work = call.work.id
        if self.waiting.pop(work, None) is not None:
            self.taken_back[work] = call
            self.drop([work])
        elif work in self.running:
            self.drop([work])

    def calls(self) -> list[PoolCall]:
        """Return all its calls."""
        return [*self.waiting.values(), *(run.call for run in self.running.values())]

    def drop(self, ids: Iterable[int]) -> None:
        """Ask the child to drop these works."""
        self.child.send([Drop(list(ids))])
