"""Who is to blame when a work passes its limit or a child dies: only that one ends badly.

process
    A work passes its limit: it is to blame, its child is killed. A child dies: the work that it ran is to blame.
thread
    A work passes its limit: it is to blame, unless a neighbour took the processor from it (then forgiven once). Its
    child is replaced; its neighbours finish there. A child dies: all that it ran are forgiven once.
inline
    A work passes its limit: it is cancelled. If it does not end, its child is replaced and its neighbours finish there;
    if it holds the event loop, its child is killed and its neighbours run again. A child dies: as for threads.

Forgiven: run again, because it cannot be told who of several was to blame. What has not begun always runs again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from plaudit_reward.errors import ScoreTimeoutError, WorkerKilledError
from plaudit_reward.functions.target import Isolation
from plaudit_reward.isolation.cpu import process_cpu_s, thread_cpu_s
from plaudit_reward.isolation.slot import Call, Run, Slot

GRACE_S = 1.0
"""A cancelled work has so long to end."""
_STARVED_PROCESS_SHARE = 0.5
_STARVED_THREAD_SHARE = 0.1


@dataclass
class Verdict:
    """What is to be done about one slot."""

    again: list[Call] = field(default_factory=list)
    """Run these again."""
    retire: bool = False
    """Give the slot nothing more and put another in its place."""
    kill: bool = False
    """End its child now, whatever it runs."""


def judge_limits(slot: Slot, isolation: Isolation, now_s: float) -> Verdict:
    """Ends the works of a slot that have passed their limit."""
    verdict = Verdict()
    for run in [run for run in slot.running.values() if now_s >= run.deadline_s]:
        if verdict.kill:
            break
        if isolation == "process":
            _end(slot, run, "")
            verdict.retire = verdict.kill = True
        elif isolation == "thread":
            _judge_thread(slot, run, now_s, verdict)
        elif not run.cancelled:
            run.cancelled = True
            run.deadline_s = now_s + GRACE_S
            slot.drop([run.call.work.id])
        else:
            _judge_task(slot, run, now_s, verdict)
    if verdict.kill:
        verdict.again += [run.call for run in slot.running.values()]
        slot.running.clear()
    return verdict


def judge_death(slot: Slot, how: str) -> list[Call]:
    """A child died by itself: gives the calls to run again, in order; those to blame have failed."""
    runs = list(slot.running.values())
    forgiven = [run.call for run in runs if len(runs) > 1 and run.call.doubts == 0]
    for run in runs:
        if run.call in forgiven:
            run.call.doubts += 1
        else:
            run.call.fail(WorkerKilledError(f"the process that ran it {how}"))
    return [*forgiven, *slot.waiting.values()]


def spare_neighbours(slot: Slot, seconds: float) -> None:
    """The event loop was held for ``seconds``: the limits of all but the holder are moved by as much."""
    for run in slot.running.values():
        if slot.blocked is None or run.call.work.id != slot.blocked.id:
            run.deadline_s += seconds


def timed_out(call: Call, why: str = "") -> ScoreTimeoutError:
    """The error of a call that passed its limit; ``why`` follows on it."""
    return ScoreTimeoutError(f"no result within {call.limit_s:g} s{why}")


def _judge_thread(slot: Slot, run: Run, now_s: float, verdict: Verdict) -> None:
    verdict.retire = True
    if run.call.doubts == 0 and _starved(slot, run, now_s):
        run.call.doubts += 1
        del slot.running[run.call.work.id]
        verdict.again.append(run.call)
    else:
        _end(slot, run, "")


def _judge_task(slot: Slot, run: Run, now_s: float, verdict: Verdict) -> None:
    verdict.retire = True
    if slot.heard_s < run.deadline_s - GRACE_S and run.call.doubts == 0 and len(slot.running) > 1:
        # Not even the watchdog speaks: one of them holds the interpreter itself.
        verdict.kill = True
        for other in slot.running.values():
            other.call.doubts += 1
    elif slot.blocked is not None and now_s - slot.heard_s < GRACE_S and slot.blocked.id == run.call.work.id:
        verdict.kill = True
        _end(
            slot,
            run,
            f": it blocks the event loop in {slot.blocked.where}. Await there, or set isolation: process for this "
            "scorer (isolation: thread with a function that is not async)",
        )
    else:
        _end(slot, run, ": it did not end when it was cancelled")


def _starved(slot: Slot, run: Run, now_s: float) -> bool:
    """Whether its neighbours kept the interpreter busy while it hardly ran."""
    wall_s = now_s - run.started_s
    process_s = process_cpu_s(slot.child.pid) - run.report.process_cpu_s
    thread_s = thread_cpu_s(slot.child.pid, run.report.thread) - run.report.thread_cpu_s
    return process_s > _STARVED_PROCESS_SHARE * wall_s and thread_s < _STARVED_THREAD_SHARE * process_s


def _end(slot: Slot, run: Run, why: str) -> None:
    del slot.running[run.call.work.id]
    run.call.fail(timed_out(run.call, why))
