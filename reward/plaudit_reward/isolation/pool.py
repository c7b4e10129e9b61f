"""Run one user function in a pool of child processes: queue works and assign them. ``watch`` enforces the limits."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from plaudit_reward.functions.target import Description, Target
from plaudit_reward.isolation.blame import judge_death, spare_neighbours, timed_out
from plaudit_reward.isolation.child_processes import ChildProcesses
from plaudit_reward.isolation.messages import Blocked, Dropped, Finished, FromChild, Started, Work
from plaudit_reward.isolation.slot import Pace, PoolCall, Slot
from plaudit_reward.isolation.watch import Watch
from plaudit_reward.score import Score
from plaudit_reward.scorer import Attempt
from plaudit_wire.errors import InfrastructureError
from plaudit_wire.logs import get_logger
from plaudit_wire.sample import Sample

logger = get_logger(__name__)

_LOOK_AHEAD_S = 0.25
"""Seconds of work that may wait in a pool: more would wait here while another worker is idle."""
_UNKNOWN_PACE_S = 0.05


class Pool:
    """Run one user function in child processes.

    Args:
        processes: how many children run it (one for async functions).
        max_concurrent: limit on concurrent works where a child can run several.
    """

    def __init__(self, name: str, target: Target, *, processes: int = 2, max_concurrent: int = 256) -> None:
        self.name = name
        self._children = ChildProcesses(name, target, processes, max_concurrent, self)
        self._pace = Pace()
        self._queue: deque[PoolCall] = deque()
        self._max_concurrent = max_concurrent
        self._ids = itertools.count()
        self._scheduled = False
        self._watch = Watch(self._children, self._pace, self._queue, self._run_again)
        self._logged: set[str] = set()

    async def open(self) -> Description:
        """Start the children; return when the first has loaded the function, or raise ``ConfigurationError``."""
        try:
            return await self._children.open()
        except BaseException:
            await self.close()
            raise

    async def call(
        self,
        samples: Sequence[Sample],
        attempt: Attempt,
        *,
        values: Any = None,
        post_process: bool = False,
        traceparent: str = "",
    ) -> list[Score]:
        """Call the function once.

        Args:
            samples: one sample, or a group's.
            attempt: the limit; the time until the call begins is added to its ``queued_s``.

        Raises:
            ScoreTimeoutError: it ran longer than the limit and was ended.
            WorkerKilledError: it, or something outside, ended its child.
            InfrastructureError: no child can be started.
        """
        work = Work(next(self._ids), list(samples), values, post_process, traceparent)
        answer: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()
        call = PoolCall(work, attempt.limit_s, answer, time.monotonic())
        self._queue.append(call)
        self._schedule()
        try:
            return (await answer).scores
        except asyncio.CancelledError:
            if call.slot is not None:
                call.slot.forget(call)
            raise
        finally:
            attempt.queued_s += call.waited_s if call.began else time.monotonic() - call.queued_s

    def room(self) -> int:
        """Return how many more works could begin soon."""
        # A late work may never end: additional children are started when works wait.
        given = len(self._queue) + sum(slot.num_given for slot in self._children.slots if not slot.late)
        if not self._children.one_at_a_time:
            return max(0, self._max_concurrent - given)
        mean_s = self._pace.mean_s if self._pace.mean_s is not None else _UNKNOWN_PACE_S
        soon = self._children.processes * (1 + int(_LOOK_AHEAD_S / max(mean_s, 1e-4)))
        return max(0, soon - given)

    async def close(self) -> None:
        """End all children; calls that have not ended fail."""
        self._watch.stop()
        closed = InfrastructureError(f"scorer {self.name} was closed")
        for call in [*self._queue, *(call for slot in self._children.slots for call in slot.calls())]:
            call.fail(closed)
        self._queue.clear()
        await self._children.close()

    # Events of the child processes.

    def on_messages(self, slot: Slot, messages: list[FromChild]) -> None:
        """Record works that began and ended."""
        now_s = slot.last_message_s = time.monotonic()
        for message in messages:
            if isinstance(message, Finished):
                self._on_finished(slot, message)
            elif isinstance(message, Started):
                overtaken = slot.begin(message, now_s)
                if overtaken is not None and overtaken in self._queue:
                    self._queue.remove(overtaken)  # it began before it could be taken back
            elif isinstance(message, Dropped):
                slot.dropped(message)
            elif isinstance(message, Blocked):
                self._on_blocked(slot, message)
        if self._queue:
            self._schedule()

    def on_ready(self) -> None:
        """Assign works to another child."""
        self._schedule()

    def on_death(self, slot: Slot, how: str) -> None:
        """Run the works of a dead child again."""
        self._run_again(judge_death(slot, how))

    def on_unavailable(self, reason: str) -> None:
        """Fail all waiting calls, so that they are retried later or on another worker."""
        for call in self._queue:
            call.fail(InfrastructureError(f"scorer {self.name} cannot be started again: {reason}"))
        self._queue.clear()

    def _on_finished(self, slot: Slot, report: Finished) -> None:
        self._pace.add(report.seconds)
        run = slot.end(report)
        if run is None or run.call.answer.done():
            return
        if run.cancelled and all(score.outcome == "timeout" for score in report.scores):
            run.call.fail(timed_out(run.call))
        else:
            run.call.answer.set_result(report)

    def _on_blocked(self, slot: Slot, report: Blocked) -> None:
        before_s = slot.blocked.seconds if slot.blocked is not None and slot.blocked.id == report.id else 0.0
        slot.blocked = report
        spare_neighbours(slot, report.seconds - before_s if report.seconds > before_s else report.seconds)
        if report.where not in self._logged:
            self._logged.add(report.where)
            fields = {"scorer": self.name, "where": report.where, "seconds": round(report.seconds, 2)}
            logger.warning("async reward function blocks its event loop", **fields)

    # Assignment.

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._assign)

    def _assign(self) -> None:
        self._scheduled = False
        rooms = [(slot, self._room_in(slot)) for slot in self._children.slots if slot.ready and not slot.draining]
        rooms = sorted(((slot, room) for slot, room in rooms if room > 0), key=lambda pair: pair[0].num_given)
        for position, (slot, room) in enumerate(rooms):
            share = math.ceil(len(self._queue) / (len(rooms) - position))
            calls = self._next(min(room, share))
            if calls:
                slot.give(calls)
        self._watch.go_on()

    def _room_in(self, slot: Slot) -> int:
        if self._children.one_at_a_time:
            return 0 if slot.late else self._pace.ahead() - slot.num_given
        return self._children.slots_each - slot.num_given

    def _next(self, count: int) -> list[PoolCall]:
        calls: list[PoolCall] = []
        while self._queue and len(calls) < count:
            call = self._queue.popleft()
            if not call.answer.done():
                calls.append(call)
        return calls

    def _run_again(self, calls: Sequence[PoolCall]) -> None:
        self._queue.extendleft(reversed([call for call in calls if not call.answer.done()]))
        self._schedule()
