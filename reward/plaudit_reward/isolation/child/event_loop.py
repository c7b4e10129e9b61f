"""``isolation: inline``: run async functions, all in the event loop of one child process.

The worker's own loop renews leases, so no user code runs in it. A watchdog thread here detects a blocked loop and names
the function that blocks it.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import time
import traceback
from typing import Any

from plaudit_reward.functions.function import UserFunction
from plaudit_reward.functions.target import Description
from plaudit_reward.functions.trace import within_trace
from plaudit_reward.isolation.child.call import finished, num_scores
from plaudit_reward.isolation.child.sequential import run_sequential
from plaudit_reward.isolation.messages import Blocked, Channel, Drop, FromPool, FunctionLoaded, Started, Work
from plaudit_reward.score import Score
from plaudit_wire.errors import ConfigurationError

_LOOK_EVERY_S = 0.25
_BLOCKED_AFTER_S = 0.25


def run_async(function: UserFunction, channel: Channel) -> None:
    """Prepare the function inside an event loop and run works until the pool closes the connection (``EOFError``)."""
    with asyncio.Runner() as runner:
        description = runner.run(_prepare(function))
        channel.send([FunctionLoaded(description)])
        if description.isolation == "process":
            run_sequential(function, channel, lambda returned: runner.run(_awaited(returned)))
        runner.run(_Works(function, channel).run())


async def _prepare(function: UserFunction) -> Description:
    description = function.prepare()
    if description.isolation == "thread":
        raise ConfigurationError(
            f"{function.target.function} in {function.target.path} is async, and isolation: thread is for functions "
            "that block: leave isolation out (inline), or take process"
        )
    return description


async def _awaited(returned: Any) -> Any:
    return await returned if inspect.isawaitable(returned) else returned


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
            self._take_in(message)

    def _take_in(self, message: FromPool) -> None:
        if isinstance(message, Work):
            self._tasks[message.id] = asyncio.create_task(self._perform(message), name=str(message.id))
        elif isinstance(message, Drop):
            for work in message.ids:
                if work in self._tasks:
                    self._dropped.add(work)
                    self._tasks[work].cancel()

    async def _perform(self, work: Work) -> None:
        self._channel.send([Started(work.id)])
        began = time.perf_counter()
        try:
            with within_trace(work.traceparent, alone=False):
                returned = await _awaited(
                    self._function.call(work.samples, work.values, post_process=work.post_process)
                )
            scores = self._function.scores(returned, num_scores(work), post_process=work.post_process)
        except BaseException as error:  # the user's code: sys.exit and the like included
            scores = self._failed(work, error)
        self._dropped.discard(work.id)
        del self._tasks[work.id]
        self._channel.send([finished(work, time.perf_counter() - began, scores)])

    def _failed(self, work: Work, error: BaseException) -> list[Score]:
        if isinstance(error, asyncio.CancelledError) and work.id in self._dropped:
            return [Score.failed("timeout", "cancelled at its time limit")] * num_scores(work)
        return self._function.failed(error, num_scores(work))


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
