"""Decide which work is to blame when a work passes its limit or a child dies: only that one fails.

process
    A work passes its limit: it is to blame, and its child is killed. A child dies: the work that it ran is to blame.
thread
    A work passes its limit: it is to blame, unless another one took the processor from it; then it is excused once. Its
    child is replaced; the others finish there. A child dies: all works that it ran are excused once.
inline
    A work passes its limit: it is cancelled. If it does not end, its child is replaced and the others finish there; if
    it blocks the event loop, its child is killed and the others run again. A child dies: as for threads.

An excused work runs again, because the evidence does not show which of several is to blame. Works that have not begun
always run again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from plaudit_reward.functions.target import Isolation
from plaudit_reward.isolation.cpu import process_cpu_s, thread_cpu_s
from plaudit_reward.isolation.slot import PoolCall, RunningCall, Slot
from plaudit_wire.errors import ScoreTimeoutError, WorkerKilledError

GRACE_S = 1.0
"""How long a cancelled work may take to end."""
_STARVED_PROCESS_SHARE = 0.5
_STARVED_THREAD_SHARE = 0.1


@dataclass
class SlotActions:
    """The actions that one slot needs."""

    again: list[PoolCall] = field(default_factory=list)
    """Calls to run again."""
    retire: bool = False
    """Give the slot no more works and start another one."""
    kill: bool = False
    """Kill its child now, whatever it runs."""


def judge_limits(slot: Slot, isolation: Isolation, now_s: float) -> SlotActions:
    """End the works of a slot that have passed their limit."""
    actions = SlotActions()
    for run in [run for run in slot.running.values() if now_s >= run.deadline_s]:
        if actions.kill:
            break
        if isolation == "process":
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
    if slot.last_message_s < run.deadline_s - GRACE_S and run.call.num_excused == 0 and len(slot.running) > 1:
        # Not even the watchdog thread reports: one of the works holds the interpreter lock.
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


def _starved(slot: Slot, run: RunningCall, now_s: float) -> bool:
    """Return True when other works kept the interpreter busy while this one hardly ran."""
    wall_s = now_s - run.started_s
    process_s = process_cpu_s(slot.child.pid) - run.report.process_cpu_s
    thread_s = thread_cpu_s(slot.child.pid, run.report.thread) - run.report.thread_cpu_s
    return process_s > _STARVED_PROCESS_SHARE * wall_s and thread_s < _STARVED_THREAD_SHARE * process_s


def _end(slot: Slot, run: RunningCall, why: str) -> None:
    del slot.running[run.call.work.id]
    run.call.fail(timed_out(run.call, why))
