"""Run a child process of a pool: load one user function and call it until the pool closes the connection.

Started as ``python -m plaudit_reward.isolation.child <file descriptor> <parent's process id>``. Its standard output and
error are a pipe to the pool. It ends with its parent, however that one ends. Whatever happens in a call becomes typed
scores. How it calls the function depends on the isolation:

process
    Works run one by one in the main thread, where ``signal.alarm`` of user code works.
thread
    Works that block on the network run each in a thread of its own.
inline
    Async functions run all in one event loop. The worker's own loop renews leases, so no user code runs in it. A
    watchdog thread detects a blocked loop and names the function that blocks it.
"""

from __future__ import annotations

import asyncio
import faulthandler
import io
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from plaudit_reward.functions.function import UserFunction, awaited, keep_content
from plaudit_reward.functions.result import Description, within_trace
from plaudit_reward.isolation.messages import (
    Blocked,
    Channel,
    Drop,
    Dropped,
    Finished,
    FromChild,
    FromPool,
    FunctionLoaded,
    FunctionRefused,
    LoadFunction,
    Started,
    Work,
    num_scores,
)
from plaudit_reward.scorer import Score
from plaudit_sandbox.lifetime import end_if_forked, end_when_closed
from plaudit_sandbox.privileges import end_with
from plaudit_wire.errors import ConfigurationError
from plaudit_wire.frames import frame

Resolve = Callable[[Any], Any]
"""Turns the return value of a call into its result (awaits it)."""


def perform(function: UserFunction, work: Work, resolve: Resolve | None = None, *, alone: bool = False) -> Finished:
    """Call the function for one work; never raises. ``alone``: the child runs one work at a time."""
    began = time.perf_counter()
    try:
        with within_trace(work.traceparent, alone=alone):
            returned = function.call(work.samples, work.values, post_process=work.post_process)
            if resolve is not None:
                returned = resolve(returned)
        scores = function.scores(returned, num_scores(work), post_process=work.post_process)
        end_if_forked()
    except BaseException as error:  # the user's code: sys.exit and the like included
        end_if_forked(error)
        scores = function.failed(error, num_scores(work))
    finally:
        function.stop_timers()
    return finished(work, time.perf_counter() - began, scores)


def finished(work: Work, seconds: float, scores: list[Score]) -> Finished:
    """Return the report of one work; a score that cannot be encoded becomes a ``data_error``."""
    report = Finished(work.id, seconds, scores)
    if any(score.extra or score.reason for score in scores):
        try:
            frame([report])
        except (TypeError, ValueError, OverflowError):
            return Finished(work.id, seconds, [_encodable(score) for score in scores])
    return report


def _encodable(score: Score) -> Score:
    try:
        frame([score])
    except (TypeError, ValueError, OverflowError) as error:
        return Score.failed("data_error", f"the result cannot be encoded: {type(error).__name__}")
    return score


_LOOK_UP_AFTER_S = 0.002
"""After a work that took longer, messages that drop waiting works are read before the next."""


def run_sequential(function: UserFunction, channel: Channel, resolve: Resolve | None = None) -> None:
    """Run works until the pool closes the connection (``EOFError``).

    The result of one work travels with the start of the next: one system call a sample.
    """
    waiting: deque[Work] = deque()
    report: list[FromChild] = []
    while True:
        if not waiting:
            if report:
                channel.send(report)
                report = []
            report += _take_in(channel.receive(), waiting)
            continue
        work = waiting.popleft()
        channel.send([*report, Started(work.id, process_cpu_s=time.process_time())])
        began = time.monotonic()
        report = [perform(function, work, resolve, alone=True)]
        if time.monotonic() - began > _LOOK_UP_AFTER_S:
            report += _take_in(channel.receive(wait=False), waiting)


def _take_in(messages: list[FromPool], waiting: deque[Work]) -> list[FromChild]:
    """Add works to ``waiting`` and remove dropped ones; return the messages about it."""
    dropped: list[int] = []
    for message in messages:
        if isinstance(message, Work):
            waiting.append(message)
        elif isinstance(message, Drop):
            unwanted = set(message.ids)
            dropped += [work.id for work in waiting if work.id in unwanted]
            kept = [work for work in waiting if work.id not in unwanted]
            waiting.clear()
            waiting.extend(kept)
    return [Dropped(dropped)] if dropped else []


_LOOK_EVERY_S = 0.25
_BLOCKED_AFTER_S = 0.25


def run_async(function: UserFunction, channel: Channel) -> None:
    """Prepare the function inside an event loop and run works until the pool closes the connection (``EOFError``)."""
    with asyncio.Runner() as runner:
        description = runner.run(_prepared(function))
        channel.send([FunctionLoaded(description)])
        if description.isolation == "process":
            run_sequential(function, channel, lambda returned: runner.run(awaited(returned)))
        runner.run(_Works(function, channel).run())


async def _prepared(function: UserFunction) -> Description:
    description = function.prepare()
    if description.isolation == "thread":
        raise ConfigurationError(
            f"{function.target.function} in {function.target.path} is async, and isolation: thread is for functions "
            "that block: leave isolation out (inline), or take process"
        )
    return description


class _Works:
    """Run the works of one event loop."""

    def __init__(self, function: UserFunction, channel: Channel) -> None:
        self._function = function
        self._channel = channel
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._dropped: set[int] = set()
        self._closed = asyncio.Event()

    async def run(self) -> None:
        """Run works until the pool closes the connection."""
        loop = asyncio.get_running_loop()
        watchdog = (loop, threading.get_ident(), self._channel, self._function.target.path)
        threading.Thread(target=_watch, args=watchdog, daemon=True).start()
        loop.add_reader(self._channel.connection, self._read)
        await self._closed.wait()
        raise EOFError

    def _read(self) -> None:
        try:
            messages = self._channel.receive(wait=False)
        except EOFError:
            self._closed.set()
            return
        for message in messages:
            if isinstance(message, Work):
                self._tasks[message.id] = asyncio.create_task(self._perform(message), name=str(message.id))
            elif isinstance(message, Drop):
                for work in self._tasks.keys() & set(message.ids):
                    self._dropped.add(work)
                    self._tasks[work].cancel()

    async def _perform(self, work: Work) -> None:
        self._channel.send([Started(work.id)])
        began = time.perf_counter()
        try:
            with within_trace(work.traceparent, alone=False):
                returned = await awaited(self._function.call(work.samples, work.values, post_process=work.post_process))
            scores = self._function.scores(returned, num_scores(work), post_process=work.post_process)
            end_if_forked()
        except BaseException as error:  # the user's code: sys.exit and the like included
            end_if_forked(error)
            if work.id in self._dropped and issubclass(type(error), asyncio.CancelledError):  # it may hide its class
                scores = [Score.failed("timeout", "cancelled at its time limit")] * num_scores(work)
            else:
                scores = self._function.failed(error, num_scores(work))
        finally:
            self._function.stop_timers()
        self._dropped.discard(work.id)
        del self._tasks[work.id]
        self._channel.send([finished(work, time.perf_counter() - began, scores)])


def _watch(loop: asyncio.AbstractEventLoop, loop_thread: int, channel: Channel, path: str) -> None:
    while True:
        time.sleep(_LOOK_EVERY_S)
        turned = threading.Event()
        began = time.monotonic()
        loop.call_soon_threadsafe(turned.set)
        while not turned.wait(_BLOCKED_AFTER_S):
            task = asyncio.current_task(loop)
            work = int(task.get_name()) if task is not None and task.get_name().isdigit() else -1
            channel.send([Blocked(work, time.monotonic() - began, _where(loop_thread, path))])


def _where(thread: int, path: str) -> str:
    """Return the line of the user's file that the thread runs; the innermost line when it runs none."""
    current = sys._current_frames().get(thread)
    if current is None:
        return "an unknown place"
    stack = traceback.extract_stack(current)
    innermost = next((line for line in reversed(stack) if line.filename == path), stack[-1])
    return f"{innermost.name} ({innermost.filename}:{innermost.lineno})"


_STACK_BYTES = 1 << 20
"""With hundreds of threads, the default of 8 MiB each is address space that containers may count."""


def run_threads(function: UserFunction, channel: Channel, slots: int) -> None:
    """Run works until the pool closes the connection (``EOFError``), at most ``slots`` at a time."""
    threading.stack_size(_STACK_BYTES)
    waiting: SimpleQueue[Work] = SimpleQueue()
    dropped: set[int] = set()
    idle = threading.Semaphore(0)
    num_threads = 0
    while True:
        for message in channel.receive():
            if isinstance(message, Drop):
                dropped.update(message.ids)
            elif isinstance(message, Work):
                waiting.put(message)
                if not idle.acquire(blocking=False) and num_threads < slots:
                    num_threads += 1
                    arguments = (function, channel, waiting, dropped, idle)
                    threading.Thread(target=_work, args=arguments, daemon=True).start()


def _work(
    function: UserFunction, channel: Channel, waiting: SimpleQueue[Work], dropped: set[int], idle: threading.Semaphore
) -> None:
    thread = threading.get_native_id()
    while True:
        work = waiting.get()
        if work.id not in dropped:
            channel.send([Started(work.id, thread, time.process_time(), time.thread_time())])
            channel.send([perform(function, work)])
        dropped.discard(work.id)
        idle.release()


def main() -> int:
    """Load the function, report, run works."""
    end_with(int(sys.argv[2]))
    faulthandler.enable()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The last lines of a killed function are logged, and no locale makes a print raise.
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    connection = socket.socket(fileno=int(sys.argv[1]))
    end_when_closed(connection)
    channel = Channel(connection)
    (load,) = channel.receive()
    if not isinstance(load, LoadFunction):
        raise TypeError(f"the first message must be Load, not {type(load).__name__}")
    try:
        _run(load, channel)
    except ConfigurationError as error:
        channel.send([FunctionRefused(str(error))])
        return 2
    except EOFError:
        pass
    return 0


def _run(load: LoadFunction, channel: Channel) -> None:
    keep_content(load.files)
    function = UserFunction(load.target)
    if function.is_async:
        run_async(function, channel)
        return
    description = function.prepare()
    channel.send([FunctionLoaded(description)])
    if description.isolation == "thread":
        run_threads(function, channel, load.slots)
    else:
        run_sequential(function, channel)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # threads of the user's file must not keep the process alive
