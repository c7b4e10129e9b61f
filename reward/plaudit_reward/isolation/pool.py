"""Run one user function in a pool of child processes: queue works, assign them, enforce their limits.

When a work passes its limit or a child dies, only the work that is to blame fails:

process
    A work passes its limit: it is to blame, and its child is killed. A child dies: the work that it ran is to blame.
thread
    A work passes its limit: it is to blame, unless another one took the processor from it; then it is excused once. Its
    child is replaced; the others finish there. A child dies: all works that it ran are excused once.
inline
    A work passes its limit: it is cancelled. If it does not end, its child is replaced and the others finish there; if
    it blocks the event loop, its child is killed and the others run again. A callback blocks the event loop, or a child
    dies: as for threads.

An excused work runs again, because the evidence does not show which of several is to blame. Works that have not begun
always run again.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plaudit_reward.functions.result import OF_THE_STREAM, Description, Isolation, Target
from plaudit_reward.isolation.children import ChildProcesses, Pace, PoolCall, RunningCall, Slot
from plaudit_reward.isolation.messages import Blocked, Dropped, Finished, FromChild, Started, Work, num_scores
from plaudit_reward.scorer import Attempt, Score
from plaudit_wire.errors import InfrastructureError, ScoreTimeoutError, WorkerKilledError
from plaudit_wire.logs import get_logger
from plaudit_wire.records import Sample

logger = get_logger(__name__)
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int, thread: int | None = None) -> float:
    """Return the CPU seconds that a process, or one of its threads, has used so far; 0 when it has ended."""
    stat = Path(f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat")
    try:
        # The name in the second field may contain spaces and parentheses; fields after the last one are regular.
        fields = stat.read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


GRACE_S = 1.0
"""How long a cancelled work may take to end."""
_STARVED_PROCESS_SHARE = 0.5
_STARVED_THREAD_SHARE = 0.1


@dataclass
class SlotActions:
    """Name the actions that one slot needs."""

    again: list[PoolCall] = field(default_factory=list)
    """Calls to run again."""
    retire: bool = False
    """Give the slot no more works and start another one."""
    kill: bool = False
    """Kill its child now, whatever it runs."""


def judge_limits(slot: Slot, isolation: Isolation, now_s: float, *, by_cpu: bool = False) -> SlotActions:
    """End the works of a slot that have passed their limit, which ``by_cpu`` counts in CPU seconds of their process."""
    actions = SlotActions()
    for run in [run for run in slot.running.values() if now_s >= run.deadline_s]:
        if actions.kill:
            break
        if isolation == "process":
            if by_cpu and (left_s := _cpu_left_s(slot, run)) > 0:
                run.deadline_s = now_s + left_s
                continue
            _end(slot, run, "")
            actions.retire = actions.kill = True
        elif isolation == "thread":
            _judge_thread(slot, run, now_s, actions)
        elif not run.cancelled:
            run.cancelled = True
            run.deadline_s = now_s + GRACE_S
            slot.drop([run.call.work.id])
        else:
            _judge_task(slot, run, now_s, actions)
    if actions.kill:
        actions.again += [run.call for run in slot.running.values()]
        slot.running.clear()
    return actions


def judge_death(slot: Slot, how: str) -> list[PoolCall]:
    """Fail the calls that are to blame for a child's death; return the others, in order, to run again."""
    runs = list(slot.running.values())
    excused = [run.call for run in runs if len(runs) > 1 and run.call.num_excused == 0]
    for run in runs:
        if run.call in excused:
            run.call.num_excused += 1
        else:
            run.call.fail(WorkerKilledError(f"the process that ran it {how}"))
    return [*excused, *slot.waiting.values()]


def spare_neighbours(slot: Slot, seconds: float) -> None:
    """Extend the limits of all works but the one that blocked the event loop, by the ``seconds`` that it did."""
    for run in slot.running.values():
        if slot.blocked is None or run.call.work.id != slot.blocked.id:
            run.deadline_s += seconds


def timed_out(call: PoolCall, why: str = "") -> ScoreTimeoutError:
    """Return the error of a call that passed its limit; ``why`` is appended."""
    return ScoreTimeoutError(f"no result within {call.limit_s:g} s{why}")


def _judge_thread(slot: Slot, run: RunningCall, now_s: float, actions: SlotActions) -> None:
    actions.retire = True
    if run.call.num_excused == 0 and _starved(slot, run, now_s):
        run.call.num_excused += 1
        del slot.running[run.call.work.id]
        actions.again.append(run.call)
    else:
        _end(slot, run, "")


def _judge_task(slot: Slot, run: RunningCall, now_s: float, actions: SlotActions) -> None:
    actions.retire = True
    # Not even the watchdog thread reports: one of the works holds the interpreter lock.
    silent = slot.last_message_s < run.deadline_s - GRACE_S
    if (silent or _blocked_by_nobody(slot)) and run.call.num_excused == 0 and len(slot.running) > 1:
        actions.kill = True
        for other in slot.running.values():
            other.call.num_excused += 1
    elif slot.blocked is not None and now_s - slot.last_message_s < GRACE_S and slot.blocked.id == run.call.work.id:
        actions.kill = True
        _end(
            slot,
            run,
            f": it blocks the event loop in {slot.blocked.where}. Await there, or set isolation: process for this "
            "scorer (isolation: thread with a function that is not async)",
        )
    else:
        _end(slot, run, ": it did not end when it was cancelled")


def _blocked_by_nobody(slot: Slot) -> bool:
    """Return True while something that belongs to no work, such as a callback, blocks the event loop."""
    return slot.blocked is not None and slot.blocked.id not in slot.running and slot.blocked.seconds > GRACE_S


def _starved(slot: Slot, run: RunningCall, now_s: float) -> bool:
    """Return True when other works kept the interpreter busy while this one hardly ran."""
    wall_s = now_s - run.started_s
    process_s = cpu_s(slot.child.pid) - run.report.process_cpu_s
    thread_s = cpu_s(slot.child.pid, run.report.thread) - run.report.thread_cpu_s
    return process_s > _STARVED_PROCESS_SHARE * wall_s and thread_s < _STARVED_THREAD_SHARE * process_s


def _cpu_left_s(slot: Slot, run: RunningCall) -> float:
    """Return the CPU seconds that a work has left; 0 if it used none since the last look, because it waits for good."""
    used_s = cpu_s(slot.child.pid) - run.report.process_cpu_s
    if used_s <= run.cpu_used_s:
        return 0.0
    run.cpu_used_s = used_s
    return run.call.limit_s - used_s


def _end(slot: Slot, run: RunningCall, why: str) -> None:
    del slot.running[run.call.work.id]
    run.call.fail(timed_out(run.call, why))


_TICK_S = 0.05
_STALLED_AFTER_S = 0.5
"""A tick later than this means that this process was stopped or starved; all limits are extended by as much."""
_LATE_TIMES = 10
"""A work that has run for this multiple of the mean is late: works that wait behind it move to other children."""
_LATE_AFTER_S = 0.1
_VERY_LATE_AFTER_S = 0.25
"""A child whose work is later than this may hang for good: another one is started."""
_SPARES = 2
_BEGIN_WITHIN_S = 20.0
"""A child that runs nothing and begins nothing is stopped, or something that its function left behind holds it."""


class Watch:
    """Tick while works run or wait: end works that pass their limit, start more children when some hang."""

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
                slot.waiting_since_s += now_s - self._due_s
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
        if slot.waiting and not slot.running and now_s > slot.waiting_since_s + _BEGIN_WITHIN_S:
            logger.warning("scorer process begins no work", scorer=slot.name, seconds=_BEGIN_WITHIN_S)
            self._run_again(slot.take_back())
            self._children.end(slot)
            self._children.fill()
            return
        actions = judge_limits(slot, description.isolation, now_s, by_cpu=self._children.by_cpu)
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


def _problem(report: Finished, work: Work) -> str:
    """Return why a report is not of this work; empty if it is. The user's code has the connection as well."""
    if len(report.scores) != num_scores(work):
        return f"{len(report.scores)} scores for {num_scores(work)} samples"
    if any(score.outcome in OF_THE_STREAM for score in report.scores):
        return "an outcome that only the sample's delivery or its group has"
    numbers = (item for score in report.scores for item in (score.value, *score.extra.values()))
    if not all(math.isfinite(number) for number in numbers if isinstance(number, float)):
        return "a number that is not finite"
    return ""


_LOOK_AHEAD_S = 0.25
"""Seconds of work that may wait in a pool: more would wait here while another worker is idle."""
_UNKNOWN_PACE_S = 0.05


class Pool:
    """Run one user function in child processes; parameters as those of ``FunctionScorer``."""

    def __init__(self, name: str, target: Target, *, processes: int, max_concurrent: int) -> None:
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
        """Call the function once; add the time until the call begins to the attempt's ``queued_s``.

        Raises ``ScoreTimeoutError`` for a call that was ended at its limit, ``WorkerKilledError`` if it, or something
        outside, ended its child, ``InfrastructureError`` if no child can be started.
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
        now_s = time.monotonic()
        silent_s, slot.last_message_s = now_s - slot.last_message_s, now_s
        for message in messages:
            if isinstance(message, Started | Finished):
                slot.blocked, slot.waiting_since_s = None, now_s
            if isinstance(message, Finished):
                self._on_finished(slot, message, now_s)
            elif isinstance(message, Started):
                overtaken = slot.begin(message, now_s)
                if overtaken is not None and overtaken in self._queue:
                    self._queue.remove(overtaken)  # it began before it could be taken back
            elif isinstance(message, Dropped):
                slot.dropped(message)
            elif isinstance(message, Blocked):
                self._on_blocked(slot, message, silent_s)
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

    def _on_finished(self, slot: Slot, report: Finished, now_s: float) -> None:
        running = slot.running.get(report.id)
        problem = _problem(report, running.call.work) if running else ""
        if problem or not 0 <= report.seconds < math.inf:
            raise ValueError(problem or f"{report.seconds} seconds")  # not our child's: it is killed
        run = slot.end(report)
        if run is None:
            return
        self._pace.add(min(report.seconds, now_s - run.started_s + GRACE_S))
        if run.call.answer.done():
            return
        if run.cancelled and all(score.outcome == "timeout" for score in report.scores):
            run.call.fail(timed_out(run.call))
        else:
            run.call.answer.set_result(report)

    def _on_blocked(self, slot: Slot, report: Blocked, silent_s: float) -> None:
        """Extend the limits of the others, by no more than the child was silent: the user's code may report as well."""
        if self._children.one_at_a_time or not 0 <= report.seconds < math.inf:
            raise ValueError(f"an event loop that is blocked for {report.seconds} seconds")
        before_s = slot.blocked.seconds if slot.blocked is not None and slot.blocked.id == report.id else 0.0
        slot.blocked = report
        if report.id in slot.running or report.seconds <= GRACE_S:
            seconds = report.seconds - before_s if report.seconds > before_s else report.seconds
            spare_neighbours(slot, min(seconds, silent_s))
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
            calls: list[PoolCall] = []
            while self._queue and len(calls) < min(room, share):
                call = self._queue.popleft()
                if not call.answer.done():
                    calls.append(call)
            if calls:
                slot.give(calls)
        self._watch.go_on()

    def _room_in(self, slot: Slot) -> int:
        if self._children.one_at_a_time:
            return 0 if slot.late else self._pace.ahead() - slot.num_given
        return self._children.slots_each - slot.num_given

    def _run_again(self, calls: Sequence[PoolCall]) -> None:
        self._queue.extendleft(reversed([call for call in calls if not call.answer.done()]))
        self._schedule()
