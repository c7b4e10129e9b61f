"""Handle a pool's side of one child process: start it, exchange messages, detect its end, kill it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from typing import Any

from plaudit_reward.isolation.messages import FromChild, LoadFunction, messages_from_child
from plaudit_reward.isolation.output import Output
from plaudit_reward.isolation.start import start_child
from plaudit_wire.frames import READ_BYTES, Frames, frame
from plaudit_wire.signals import signal_name

_EXIT_WITHIN_S = 1.0
"""How long a child that closed its connection may take to exit, so that the message can name its exit code."""
_LOOK_EVERY_S = 0.005

OnMessages = Callable[[list[FromChild]], None]
OnExit = Callable[[str], None]
"""Called once, with a description of how it ended."""


class ChildProcess(asyncio.Protocol):
    """Run one child in a session of its own, so that all processes that the user's function starts end with it.

    Args:
        on_exit: called when it ended by itself, not after ``kill``.
    """

    def __init__(self, name: str, load: LoadFunction, on_messages: OnMessages, on_exit: OnExit) -> None:
        self._load = load
        self._on_messages = on_messages
        self._on_exit = on_exit
        self._frames = Frames()
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
        await loop.connect_read_pipe(lambda: self._output, os.fdopen(output, "rb"))
        self._transport, _ = await loop.create_connection(lambda: self, sock=ours)
        self.send([self._load])

    def send(self, messages: list[Any]) -> None:
        """Send the messages in one frame; never blocks."""
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
        """Pass complete messages of the child on."""
        for body in self._frames.feed(data):
            if self._reaper is None:
                self._on_messages(messages_from_child(body))

    def connection_lost(self, exc: Exception | None) -> None:
        """Reap a child that ended or closed its connection."""
        if exc is not None and self._connection is not None:
            self._read_last_messages(self._connection)
        if self._reaper is None and self._process is not None:
            self._reaper = asyncio.get_running_loop().create_task(self._report_exit(self._process))

    def _read_last_messages(self, connection: socket.socket) -> None:
        """Read the last messages: a write to a child that has just died ends the connection before they are read."""
        try:
            while data := connection.recv(READ_BYTES, socket.MSG_DONTWAIT):
                self.data_received(data)
        except OSError:
            return

    async def _report_exit(self, process: subprocess.Popen[bytes]) -> None:
        waited_s = 0.0
        while not _exited(process.pid) and waited_s < _EXIT_WITHIN_S:
            await asyncio.sleep(_LOOK_EVERY_S)
            waited_s += _LOOK_EVERY_S
        by_itself = _exited(process.pid)
        self._kill_session()
        await self._reap()
        how = _ending(process.returncode) if by_itself else "closed its connection to the worker"
        tail = self._output.tail()
        self._on_exit(f"{how}; it last printed: {tail}" if tail else how)

    def _kill_session(self) -> None:
        # Before the process is reaped: until then no other process can get its id.
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return

    async def _reap(self) -> None:
        assert self._process is not None
        while self._process.poll() is None:  # noqa: ASYNC110 - no event reports the end of a process
            await asyncio.sleep(_LOOK_EVERY_S)
        if self._transport is not None:
            self._transport.abort()
        self._output.close()


def _exited(pid: int) -> bool:
    """Return True when the process has ended; it is not reaped."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal_name(-code)
    return f"was killed by {name}" + (" (out of memory?)" if code == -signal.SIGKILL else "")
