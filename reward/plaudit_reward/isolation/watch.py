"""Watch the children of a pool: end works that pass their limit, start more children when some hang."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from plaudit_reward.isolation.blame import judge_limits
from plaudit_reward.isolation.child_processes import ChildProcesses
from plaudit_reward.isolation.slot import Pace, PoolCall, Slot

_TICK_S = 0.05
_STALLED_AFTER_S = 0.5
"""A tick later than this means that this process was stopped or starved; all limits are extended by as much."""
_LATE_TIMES = 10
"""A work that has run for this multiple of the mean is late: works that wait behind it move to other children."""
_LATE_AFTER_S = 0.1
_VERY_LATE_AFTER_S = 0.25
"""A child whose work is later than this may hang for good: another one is started."""
_SPARES = 2


class Watch:
    """Tick while works run or wait."""

    def __init__(
        self,
        children: ChildProcesses,
        pace: Pace,
        queue: deque[PoolCall],
        run_again: Callable[[Sequence[PoolCall]], None],
    ) -> None:
        self._children = children
        self._pace = pace
        self._queue = queue
        self._run_again = run_again
        self._ticker: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def go_on(self) -> None:
        """Tick again soon, and for as long as needed."""
        if self._ticker is None:
            self._due_s = time.monotonic() + _TICK_S
            self._ticker = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def stop(self) -> None:
        """Stop ticking."""
        if self._ticker is not None:
            self._ticker.cancel()

    def _tick(self) -> None:
        self._ticker = None
        now_s = time.monotonic()
        if now_s - self._due_s > _STALLED_AFTER_S:
            for slot in self._children.slots:
                for run in slot.running.values():
                    run.deadline_s += now_s - self._due_s
        for slot in list(self._children.slots):
            self._check(slot, now_s)
        self._replace_hung(now_s)
        self._children.tidy(now_s)
        if self._queue or not self._children.settled() or any(slot.num_given for slot in self._children.slots):
            self.go_on()

    def _check(self, slot: Slot, now_s: float) -> None:
        description = self._children.description
        if description is None:
            return
        actions = judge_limits(slot, description.isolation, now_s)
        if actions.retire:
            slot.draining = True
            self._run_again([*actions.again, *slot.take_back()])
        if actions.kill:
            self._children.end(slot)
        if actions.retire:
            self._children.fill()
        elif description.isolation == "process" and self._runs_for(slot, now_s) > self._late(_LATE_AFTER_S):
            slot.late = True
            self._run_again(slot.take_back())

    def _replace_hung(self, now_s: float) -> None:
        """Start children to replace those that may hang in a work that never ends, and a few spare ones.

        Functions often hang several at a time, and a child takes a while to load: spare ones are ready for the next.
        """
        if not self._children.one_at_a_time or not self._queue:
            return
        slots = [slot for slot in self._children.slots if not slot.draining]
        num_hung = sum(self._runs_for(slot, now_s) > self._very_late(slot) for slot in slots)
        wanted = min(self._children.processes + num_hung + _SPARES, self._children.max_children) if num_hung else 0
        for _ in range(wanted - len(slots)):
            self._children.spawn()

    def _runs_for(self, slot: Slot, now_s: float) -> float:
        return max((now_s - run.started_s for run in slot.running.values()), default=-math.inf)

    def _late(self, at_least_s: float) -> float:
        return max(at_least_s, _LATE_TIMES * (self._pace.mean_s or 0.0))

    def _very_late(self, slot: Slot) -> float:
        if self._pace.mean_s is not None:
            return self._late(_VERY_LATE_AFTER_S)
        return min((run.call.limit_s / 4 for run in slot.running.values()), default=math.inf)
