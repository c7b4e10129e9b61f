"""One child of a pool with the works it was given: which wait in it, which run, until when."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from plaudit_reward.errors import RewardError
from plaudit_reward.isolation.messages import Blocked, Drop, Dropped, Finished, FromChild, Load, Started, Work
from plaudit_reward.isolation.process import ChildProcess

_AHEAD_S = 0.02
"""Works for so many seconds are sent ahead to a child that runs one at a time, so that it never waits for the next."""
_MAX_AHEAD = 128
_FIRST_AHEAD = 4
_WEIGHT_OF_LATEST = 0.1


@dataclass(eq=False)
class Call:
    """One work on its way through a pool."""

    work: Work
    limit_s: float
    answer: asyncio.Future[Finished]
    queued_s: float
    """When it was handed to the pool (monotonic)."""
    waited_s: float = 0.0
    """How long it waited until it began, the last time it did."""
    began: bool = False
    doubts: int = 0
    """How often it was run again because it could not be told whether it or a neighbour ended its child."""
    slot: Slot | None = None

    def fail(self, error: RewardError) -> None:
        """Ends it without a result."""
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass(eq=False)
class Run:
    """A call that a child is running."""

    call: Call
    started_s: float
    deadline_s: float
    report: Started
    cancelled: bool = False
    """Its child was told to cancel it."""


@dataclass
class Pace:
    """How long the works of a pool take (seconds, exponential mean); None before the first result."""

    mean_s: float | None = None

    def add(self, seconds: float) -> None:
        """Takes one more duration in."""
        self.mean_s = seconds if self.mean_s is None else self.mean_s + _WEIGHT_OF_LATEST * (seconds - self.mean_s)

    def ahead(self) -> int:
        """How many works to send to a child that runs one at a time."""
        if self.mean_s is None:
            return _FIRST_AHEAD
        return max(1, min(_MAX_AHEAD, math.ceil(_AHEAD_S / max(self.mean_s, 1e-6))))


@dataclass(eq=False)
class Slot:
    """One child process and what it was given.

    Args:
        name: of the scorer, for the log.
        load: what the child loads.
        on_messages: called with the child's messages.
        on_exit: called when the child ended by itself.
    """

    name: str
    load: Load
    on_messages: Callable[[Slot, list[FromChild]], None]
    on_exit: Callable[[Slot, str], None]
    ready: bool = False
    draining: bool = False
    """It gets no more works and is ended when those it runs are done."""
    late: bool = False
    """What it runs takes much longer than usual: it gets nothing more until that is done."""
    load_until_s: float = math.inf
    idle_since_s: float = math.inf
    waiting: dict[int, Call] = field(default_factory=dict)
    running: dict[int, Run] = field(default_factory=dict)
    taken_back: dict[int, Call] = field(default_factory=dict)
    blocked: Blocked | None = None
    heard_s: float = 0.0
    """When it last said anything."""

    def __post_init__(self) -> None:
        self.child = ChildProcess(
            self.name,
            self.load,
            lambda messages: self.on_messages(self, messages),
            lambda how: self.on_exit(self, how),
        )

    @property
    def num_given(self) -> int:
        """Works in it, waiting and running."""
        return len(self.waiting) + len(self.running)

    def give(self, calls: list[Call]) -> None:
        """Hands works to the child."""
        for call in calls:
            self.waiting[call.work.id] = call
            call.slot = self
        self.child.send([call.work for call in calls])

    def take_back(self) -> list[Call]:
        """Takes the works that have not begun, in order; should one begin after all, ``begin`` tells."""
        calls = list(self.waiting.values())
        if calls:
            self.taken_back.update(self.waiting)
            self.waiting.clear()
            self.child.send([Drop([call.work.id for call in calls])])
        return calls

    def begin(self, report: Started, now_s: float) -> Call | None:
        """A work began: its limit runs from now. Gives the call if it had been taken back."""
        overtaken = self.taken_back.pop(report.id, None)
        call = self.waiting.pop(report.id, None) or overtaken
        if call is not None:
            call.waited_s = now_s - call.queued_s
            call.began = True
            self.running[report.id] = Run(call, now_s, now_s + call.limit_s, report)
        return overtaken

    def end(self, report: Finished) -> Run | None:
        """A work ended; None when nobody waits for it any more."""
        self.late = False
        return self.running.pop(report.id, None)

    def dropped(self, report: Dropped) -> None:
        """Works that were taken back will not begin."""
        for work in report.ids:
            self.taken_back.pop(work, None)

    def forget(self, call: Call) -> None:
        """Nobody waits for this call any more: it does not begin, and is cancelled where that is possible."""
        work = call.work.id
        if self.waiting.pop(work, None) is not None:
            self.taken_back[work] = call
            self.drop([work])
        elif work in self.running:
            self.drop([work])

    def calls(self) -> list[Call]:
        """All calls in it."""
        return [*self.waiting.values(), *(run.call for run in self.running.values())]

    def drop(self, ids: Iterable[int]) -> None:
        """Tells the child that these works are not wanted any more."""
        self.child.send([Drop(list(ids))])
