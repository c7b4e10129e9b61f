"""Looks at a pool's children while they have work: ends works that pass their limit, helps when children are caught."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from plaudit_reward.isolation.blame import judge_limits
from plaudit_reward.isolation.child_processes import Crew
from plaudit_reward.isolation.slot import Call, Pace, Slot

_TICK_S = 0.05
_STALLED_AFTER_S = 0.5
"""A tick that comes later than this: this process was stopped or starved, so the limits are moved by as much."""
_LATE_TIMES = 10
"""A work that has run for so many times the mean is late: what waits behind it goes to others."""
_LATE_AFTER_S = 0.1
_VERY_LATE_AFTER_S = 0.25
"""A child whose work is later than this may be caught for good: another is started in its place."""
_SPARES = 2


class Watch:
    """Ticks while there is something to look at.

    Args:
        crew: the children.
        pace: how long works take.
        queue: works that no child has.
        run_again: puts works at the head of the queue.
    """

    def __init__(self, crew: Crew, pace: Pace, queue: deque[Call], run_again: Callable[[Sequence[Call]], None]) -> None:
        self._crew = crew
        self._pace = pace
        self._queue = queue
        self._run_again = run_again
        self._ticker: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def go_on(self) -> None:
        """Ticks again soon, and for as long as needed."""
        if self._ticker is None:
            self._due_s = time.monotonic() + _TICK_S
            self._ticker = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def stop(self) -> None:
        """Ticks no more."""
        if self._ticker is not None:
            self._ticker.cancel()

    def _tick(self) -> None:
        self._ticker = None
        now_s = time.monotonic()
        if now_s - self._due_s > _STALLED_AFTER_S:
            for slot in self._crew.slots:
                for run in slot.running.values():
                    run.deadline_s += now_s - self._due_s
        for slot in list(self._crew.slots):
            self._look_at(slot, now_s)
        self._help_out(now_s)
        self._crew.tidy(now_s)
        if self._queue or not self._crew.settled() or any(slot.num_given for slot in self._crew.slots):
            self.go_on()

    def _look_at(self, slot: Slot, now_s: float) -> None:
        description = self._crew.description
        if description is None:
            return
        verdict = judge_limits(slot, description.isolation, now_s)
        if verdict.retire:
            slot.draining = True
            self._run_again([*verdict.again, *slot.take_back()])
        if verdict.kill:
            self._crew.end(slot)
        if verdict.retire:
            self._crew.fill()
        elif description.isolation == "process" and self._runs_for(slot, now_s) > self._late(_LATE_AFTER_S):
            slot.late = True
            self._run_again(slot.take_back())

    def _help_out(self, now_s: float) -> None:
        """Starts children in the place of those that may be caught in a work that never ends, and some to spare.

        Hangs come in herds, and a child takes a while to load its function: spare ones are ready when the next hangs.
        """
        if not self._crew.one_at_a_time or not self._queue:
            return
        slots = [slot for slot in self._crew.slots if not slot.draining]
        caught = sum(self._runs_for(slot, now_s) > self._very_late(slot) for slot in slots)
        wanted = min(self._crew.processes + caught + _SPARES, self._crew.max_children) if caught else 0
        for _ in range(wanted - len(slots)):
            self._crew.spawn()

    def _runs_for(self, slot: Slot, now_s: float) -> float:
        return max((now_s - run.started_s for run in slot.running.values()), default=-math.inf)

    def _late(self, at_least_s: float) -> float:
        return max(at_least_s, _LATE_TIMES * (self._pace.mean_s or 0.0))

    def _very_late(self, slot: Slot) -> float:
        if self._pace.mean_s is not None:
            return self._late(_VERY_LATE_AFTER_S)
        return min((run.call.limit_s / 4 for run in slot.running.values()), default=math.inf)
