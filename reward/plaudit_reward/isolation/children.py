"""Run the child processes of a pool: one process, its works, and all of them together.

``ChildProcess`` starts a child, exchanges messages, detects its end, kills it. ``Slot`` tracks which works wait in it,
which run, and until when. ``ChildProcesses`` starts the children, waits until they have loaded the function, and
replaces those that end.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from plaudit_reward.functions.function import user_files
from plaudit_reward.functions.result import Description, Target
from plaudit_reward.isolation.messages import (
    Blocked,
    Drop,
    Dropped,
    Finished,
    FromChild,
    FunctionLoaded,
    FunctionRefused,
    LoadFunction,
    Started,
    Work,
    messages_from_child,
)
from plaudit_reward.isolation.start import Output, start_child
from plaudit_sandbox.lifetime import reap
from plaudit_wire.backoff import backoff_s
from plaudit_wire.errors import ConfigurationError, DataError, ScoringError
from plaudit_wire.frames import READ_BYTES, Frames, frame, how_ended
from plaudit_wire.logs import get_logger
from plaudit_wire.plain import PlainDataError, plain

logger = get_logger(__name__)
_EXIT_WITHIN_S = 1.0
"""How long a child that closed its connection may take to exit, so that the message can name its exit code."""
_LOOK_EVERY_S = 0.005
_MOST_BYTES = 256 << 20
"""Of a message that is not complete."""
OnMessages = Callable[[list[FromChild]], None]
OnExit = Callable[[str], None]
"""Called once, with a description of how it ended."""


class ChildProcess(asyncio.Protocol):
    """Run one child in a session of its own, so that all processes that the user's function starts end with it.

    ``on_exit`` is called when it ended by itself, not after ``kill``.
    """

    def __init__(self, name: str, load: LoadFunction, on_messages: OnMessages, on_exit: OnExit) -> None:
        self._load = load
        self._on_messages = on_messages
        self._on_exit = on_exit
        self._frames = Frames()
        self._unread_bytes = 0
        self._output = Output(name)
        self._connection: socket.socket | None = None
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._reaper: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Return its process id; 0 before it is started."""
        return self._process.pid if self._process else 0

    async def start(self) -> None:
        """Start the process and send it the function to load; the answer is a message. Raises as ``start_child``."""
        loop = asyncio.get_running_loop()
        self._process, ours, output = start_child("plaudit_reward.isolation.child")
        self._connection = ours
        try:
            await loop.connect_read_pipe(lambda: self._output, os.fdopen(output, "rb"))
            self._transport, _ = await loop.create_connection(lambda: self, sock=ours)
        except asyncio.CancelledError:
            self._kill_session()
            ours.close()
            await self._reap()
            raise
        self.send([self._load])

    def send(self, messages: list[Any]) -> None:
        """Send the messages in one frame; never blocks. Raises for data that cannot be encoded."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(messages))

    def kill(self) -> None:
        """Kill the process and all that it started; ``on_exit`` is not called."""
        if self._reaper is None and self._process is not None:
            self._kill_session()
            self._reaper = asyncio.get_running_loop().create_task(self._reap())

    async def ended(self) -> None:
        """Wait until the process has ended, after ``kill`` or by itself."""
        if self._reaper is not None:
            await self._reaper

    def data_received(self, data: bytes) -> None:
        """Pass complete messages of the child on; end one that sends nonsense or a flood."""
        self._unread_bytes += len(data)
        try:
            for body in self._frames.feed(data):
                self._unread_bytes = 0
                if self._reaper is None:
                    self._on_messages(messages_from_child(body))
        except Exception as error:  # whatever it sent: the user's code has the connection as well
            self._end(f"sent something that is no message ({error})")
        if self._unread_bytes > _MOST_BYTES:
            self._end(f"sent a message of more than {_MOST_BYTES >> 20} MiB")

    def _end(self, how: str) -> None:
        """Kill a child that does not keep to the protocol, and report its end."""
        if self._reaper is None and self._process is not None:
            self.kill()
            self._on_exit(how)

    def connection_lost(self, exc: Exception | None) -> None:
        """Reap a child that ended or closed its connection."""
        if exc is not None and self._connection is not None:
            # The last messages: a write to a child that has just died ends the connection before they are read.
            with contextlib.suppress(OSError):
                while data := self._connection.recv(READ_BYTES, socket.MSG_DONTWAIT):
                    self.data_received(data)
        if self._reaper is None and self._process is not None:
            self._reaper = asyncio.get_running_loop().create_task(self._report_exit(self._process))

    async def _report_exit(self, process: subprocess.Popen[bytes]) -> None:
        waited_s = 0.0
        try:
            while not _exited(process.pid) and waited_s < _EXIT_WITHIN_S:
                await asyncio.sleep(_LOOK_EVERY_S)
                waited_s += _LOOK_EVERY_S
        finally:
            by_itself = _exited(process.pid)
            self._kill_session()
            await self._reap()
        how = how_ended(process.returncode) if by_itself else "closed its connection to the worker"
        tail = self._output.tail()
        self._on_exit(f"{how}; it last printed: {tail}" if tail else how)

    def _kill_session(self) -> None:
        # Before the process is reaped: until then no other process can get its id.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _reap(self) -> None:
        assert self._process is not None
        try:
            while self._process.poll() is None:  # noqa: ASYNC110 - no event reports the end of a process
                await asyncio.sleep(_LOOK_EVERY_S)
        finally:
            reap(self._process)
            if self._transport is not None:
                self._transport.abort()
            self._output.close()


def _exited(pid: int) -> bool:
    """Return True when the process has ended; it is not reaped."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


_AHEAD_S = 0.02
"""Seconds of work that are sent ahead to a child that runs one at a time, so that it never waits for the next."""
_MAX_AHEAD = 128
_FIRST_AHEAD = 4
_WEIGHT_OF_LATEST = 0.1


@dataclass(eq=False)
class PoolCall:
    """Track one work on its way through a pool."""

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
    """Track a call that a child is running."""

    call: PoolCall
    started_s: float
    deadline_s: float
    report: Started
    cpu_used_s: float = 0.0
    """CPU seconds that it had used when it passed its limit, where CPU seconds count."""
    cancelled: bool = False
    """Its child was asked to cancel it."""


@dataclass
class Pace:
    """Measure how long the works of a pool take."""

    mean_s: float | None = None
    """Exponential mean; None before the first result."""

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
    waiting_since_s: float = 0.0
    """Since when it has been given works, or since it last began or ended one."""

    def __post_init__(self) -> None:
        self.child = ChildProcess(
            self.name, self.load, lambda messages: self.on_messages(self, messages), lambda how: self.on_exit(self, how)
        )

    @property
    def num_given(self) -> int:
        """Return the number of its works, waiting and running."""
        return len(self.waiting) + len(self.running)

    def give(self, calls: list[PoolCall]) -> None:
        """Send works to the child; a work that cannot be sent fails."""
        calls = [call for call in calls if self._sent(call)] if not self._sent(*calls) else calls
        if not self.waiting:
            self.waiting_since_s = time.monotonic()
        for call in calls:
            self.waiting[call.work.id] = call
            call.slot = self

    def _sent(self, *calls: PoolCall) -> bool:
        """Send works; return False, and fail a single one, if that is impossible."""
        try:
            self.child.send([call.work for call in calls])
        except Exception as error:  # a value that no process can decode again
            if len(calls) == 1:
                calls[0].fail(DataError(f"the sample cannot be sent to the function: {_unfit(calls[0].work) or error}"))
            return False
        return True

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


def _unfit(work: Work) -> str:
    """Return which value of a work is no plain data; empty if it is another problem."""
    parts = [(name, getattr(sample, name)) for sample in work.samples for name in _DATA]
    for name, value in [*parts, ("values", work.values)]:
        try:
            plain(value, name)
        except PlainDataError as error:
            return str(error)
    return ""


_DATA = ("extra_info", "ground_truth", "messages", "completion", "environment")
"""Fields of a sample that hold data of any form."""
_LOAD_WITHIN_S = 300.0
_MAX_FAILED_LOADS = 3
_FIRST_RESTART_PAUSE_S, _MAX_RESTART_PAUSE_S = 0.2, 30.0
_IDLE_S = 60.0
"""How long additional children stay idle before they are ended: functions often hang several at a time."""


class Owner(Protocol):
    """Receive the events of child processes."""

    def on_messages(self, slot: Slot, messages: list[FromChild]) -> None:
        """Handle messages of a loaded child."""

    def on_ready(self) -> None:
        """Handle that another child is ready."""

    def on_death(self, slot: Slot, how: str) -> None:
        """Handle the end of a loaded child that ended by itself."""

    def on_unavailable(self, reason: str) -> None:
        """Handle that no child is ready and none can be started at present."""


class ChildProcesses:
    """Keep the child processes of one pool running; parameters as those of ``FunctionScorer``."""

    def __init__(self, name: str, target: Target, processes: int, max_concurrent: int, owner: Owner) -> None:
        self.slots: list[Slot] = []
        self.processes = processes
        self.description: Description | None = None
        self._name = name
        self._target = target
        self._files: dict[str, bytes] = {}
        """The content of the user's files when the first child started: all children run the same."""
        self._max_concurrent = max_concurrent
        self._owner = owner
        self._opened: asyncio.Future[Description] | None = None
        self._failed_loads = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def one_at_a_time(self) -> bool:
        """Return True when a child runs one work at a time."""
        return self.description is None or self.description.isolation == "process"

    @property
    def max_children(self) -> int:
        """Return the limit on children, including those that take over while works run that may never end."""
        return 4 * self.processes + 4

    @property
    def slots_each(self) -> int:
        """Return how many works a child that can run several may get."""
        return math.ceil(self._max_concurrent / self.processes)

    async def open(self) -> Description:
        """Start the first child, wait until it has loaded the function, then start the others."""
        self._files = user_files(self._target.path)
        self._opened = asyncio.get_running_loop().create_future()
        self.spawn()
        try:
            async with asyncio.timeout(_LOAD_WITHIN_S):
                self.description = await self._opened
        except TimeoutError:
            raise ConfigurationError(
                f"{self._target.path} did not finish importing within {_LOAD_WITHIN_S:.0f} s: move slow work at import "
                "into the function"
            ) from None
        if self.description.isolation == "inline":
            self.processes = 1
        self.fill()
        return self.description

    def spawn(self) -> None:
        """Start one child."""
        slot = Slot(
            self._name, LoadFunction(self._target, self.slots_each, self._files), self._on_messages, self._on_exit
        )
        slot.load_until_s = time.monotonic() + _LOAD_WITHIN_S
        self.slots.append(slot)
        self._run(self._start(slot))

    def fill(self) -> None:
        """Start children until there are ``processes`` of them."""
        if not self._closed:
            for _ in range(self.processes - sum(not slot.draining for slot in self.slots)):
                self.spawn()

    def end(self, slot: Slot) -> None:
        """Kill a child now."""
        slot.child.kill()
        if slot in self.slots:
            self.slots.remove(slot)
            self._run(slot.child.ended())

    def tidy(self, now_s: float) -> None:
        """End children that have drained, that are no longer needed, or that did not load in time."""
        spare = sum(slot.ready and not slot.draining for slot in self.slots) - self.processes
        for slot in list(self.slots):
            if slot.num_given:
                slot.idle_since_s = math.inf
            elif slot.draining:
                self.end(slot)
            elif not slot.ready and now_s > slot.load_until_s:
                self.end(slot)
                self._on_failed_load("it did not finish importing")
            elif slot.ready:
                slot.idle_since_s = min(slot.idle_since_s, now_s)
                if spare > 0 and now_s - slot.idle_since_s > _IDLE_S:
                    spare -= 1
                    self.end(slot)

    @property
    def by_cpu(self) -> bool:
        """Return True when limits count CPU seconds."""
        return self._target.by_cpu

    def settled(self) -> bool:
        """Return True when ``tidy`` has nothing left to do later."""
        return len(self.slots) <= self.processes and all(slot.ready and not slot.draining for slot in self.slots)

    async def close(self) -> None:
        """End all children."""
        self._closed = True
        for slot in list(self.slots):
            self.end(slot)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self, slot: Slot) -> None:
        try:
            await slot.child.start()
        except OSError as error:
            self._on_exit(slot, f"could not be started: {error}")
        if self._closed:
            slot.child.kill()
            await slot.child.ended()

    def _on_messages(self, slot: Slot, messages: list[FromChild]) -> None:
        if slot.ready:
            self._owner.on_messages(slot, messages)
            return
        match messages[0] if messages else None:
            case FunctionLoaded(description):
                slot.ready = True
                self._failed_loads = 0
                if self._opened is not None and not self._opened.done():
                    self._opened.set_result(description)
                self._owner.on_ready()
            case FunctionRefused(message):
                self.end(slot)
                self._on_failed_load(message)

    def _on_exit(self, slot: Slot, how: str) -> None:
        if self._closed or slot not in self.slots:
            return
        self.slots.remove(slot)
        if not slot.ready:
            self._on_failed_load(f"{self._target.path} cannot be loaded: its process {how}")
            return
        logger.warning("scorer process ended", scorer=self._name, how=how)
        self._owner.on_death(slot, how)
        self.fill()

    def _on_failed_load(self, message: str) -> None:
        if self._opened is not None and not self._opened.done():
            self._opened.set_exception(ConfigurationError(message))
            return
        self._failed_loads += 1
        logger.error("scorer process not loaded", scorer=self._name, error=message)
        if self._failed_loads >= _MAX_FAILED_LOADS and not any(slot.ready for slot in self.slots):
            self._owner.on_unavailable(message)
        pause_s = backoff_s(self._failed_loads, _FIRST_RESTART_PAUSE_S, _MAX_RESTART_PAUSE_S)
        asyncio.get_running_loop().call_later(pause_s, self.fill)
