"""Start commands in machines, by one small process that forks and enters namespaces in our place.

To fork this process would copy its tables of memory, which takes longer than all else where it has loaded a model.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import fcntl
import json
import os
import socket
import subprocess
import threading
from collections.abc import AsyncIterator
from typing import BinaryIO

from plaudit_sandbox.lifetime import inherited_by_python, start_module
from plaudit_sandbox.machine_process import BUILT, ENDED, FAILED, NUM_DESCRIPTORS, STARTED, TOO_LARGE, MachineCommand
from plaudit_wire.errors import DataError, InfrastructureError

_LARGEST_MESSAGE = 4096


class StartedCommand:
    """One command; leaving ``started`` ends it, with every process of its namespaces."""

    def __init__(self, report: socket.socket, output: BinaryIO) -> None:
        self.first_pid = 0
        """The first process of its namespaces, which is ours; 0 until it is known."""
        self._output = output
        self._report = report
        self._exit_code: int | None = None
        self._is_built = False
        self._listening: socket.socket | None = None

    async def read(self, most: int) -> bytes:
        """Return more of its standard output and error; nothing at their end."""
        # No transport: uvloop's closes a pipe twice, and the second time may hit a file of another thread.
        await asyncio.sleep(0)  # a command that writes without end must not keep all else from its turn
        while True:
            try:
                return os.read(self._output.fileno(), most)
            except BlockingIOError:
                await _readable(self._output.fileno())

    async def wait(self) -> int:
        """Return the exit code, or 128 + the number of the signal that ended it.

        Raises ``DataError`` for a command too large to be executed, ``InfrastructureError`` if it cannot be started.
        """
        while self._exit_code is None:
            await self._take()
        return self._exit_code

    async def listening(self) -> socket.socket:
        """Return the socket of ``MachineCommand.port``, once. Raises as ``wait`` does."""
        while self._listening is None:
            await self._take()
        listening, self._listening = self._listening, None
        return listening

    async def _take(self) -> None:
        """Take in what its processes report next."""
        message = await self._message()
        kind, text = message[:1], message[1:].decode(errors="replace")
        if kind == STARTED:
            self.first_pid = int(text)
        elif kind == BUILT:
            self._is_built = True
        elif kind == ENDED and self._is_built:
            self._exit_code = int(text)
        elif kind == TOO_LARGE:
            raise start_error(OSError(errno.E2BIG, "too large"))
        elif kind == FAILED:
            raise InfrastructureError(f"the machine cannot be built: {text}")
        else:
            raise InfrastructureError("the machine's first process was ended from outside")

    def end(self) -> None:
        """End it, if it has not ended."""
        with contextlib.suppress(OSError):
            self._report.shutdown(socket.SHUT_WR)

    async def ended(self) -> None:
        """End it, and wait until nothing of it is left."""
        self.end()
        with contextlib.suppress(OSError):
            while await self._message():
                pass
        if self._listening is not None:
            self._listening.close()

    async def _message(self) -> bytes:
        while True:
            try:
                message, sockets, *_ = socket.recv_fds(self._report, _LARGEST_MESSAGE, 1, socket.MSG_CMSG_CLOEXEC)
                for each in sockets:
                    self._listening = socket.socket(fileno=each)
                return message
            except BlockingIOError:
                await _readable(self._report.fileno())


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(descriptor, wake)
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


@contextlib.asynccontextmanager
async def started(task: MachineCommand, stdin: bytes) -> AsyncIterator[StartedCommand]:
    """Start a command, and end it; raise ``DataError`` for one that cannot be, ``InfrastructureError``."""
    report, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with report:
        report.setblocking(False)
        with theirs:
            output = _forked(task, stdin, theirs)
        with output:
            os.set_blocking(output.fileno(), False)
            command = StartedCommand(report, output)
            try:
                yield command
            finally:
                await command.ended()


def _forked(task: MachineCommand, stdin: bytes, report: socket.socket) -> BinaryIO:
    """Have a command forked; return the pipe of its output. Raises ``DataError``, ``InfrastructureError``."""
    try:
        with _file(_encoded(task)) as asked, _file(stdin) as given:
            read_end, write_end = os.pipe()
            with os.fdopen(write_end, "wb", 0):
                pipe = os.fdopen(read_end, "rb", 0)
                try:
                    _starter.fork(asked.fileno(), given.fileno(), write_end, report.fileno())
                except BaseException:
                    pipe.close()
                    raise
                return pipe
    except (OSError, ValueError) as error:
        raise start_error(error) from error


class _Starter:
    """Hold the process that forks commands; it ends with this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._owner = 0

    def fork(self, *descriptors: int) -> None:
        """Have a command forked with these descriptors; raise ``OSError``."""
        assert len(descriptors) == NUM_DESCRIPTORS
        with self._lock:
            try:
                socket.send_fds(self._running(), [b"f"], descriptors)
            except BrokenPipeError:  # somebody ended it
                self._forget()
                socket.send_fds(self._running(), [b"f"], descriptors)

    def _forget(self) -> None:
        if self._connection is not None and self._process is not None and self._owner == os.getpid():
            self._connection.close()  # which ends the process
            self._process.wait()
            self._connection = None

    def _running(self) -> socket.socket:
        if self._connection is None or self._owner != os.getpid():
            self._process, self._connection = start_module(
                "plaudit_sandbox.machine_process", inherited_by_python(), subprocess.DEVNULL
            )
            self._owner = os.getpid()
            atexit.register(self._forget)
        return self._connection


_starter = _Starter()


def start_error(error: OSError | ValueError) -> DataError | InfrastructureError:
    """Return what it means that a command could not be started: its own fault, or this host's."""
    if isinstance(error, ValueError) or error.errno == errno.E2BIG:
        return DataError(
            "the command, its folder or its variables hold a NUL or a word above 128 KiB: put it into a file"
        )
    return InfrastructureError(f"no process can be started: {error}")


def _encoded(task: MachineCommand) -> bytes:
    """Encode a task; raise ``ValueError`` for what no program can be given."""
    for word in (*task.command, task.directory, *(word for each in task.environment.items() for word in each)):
        if "\0" in word:
            raise ValueError(word)
    return json.dumps(task, ensure_ascii=False).encode()


def _file(content: bytes) -> BinaryIO:
    """Return a file in memory, which a command can read and not change."""
    file = os.fdopen(os.memfd_create("given", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b")
    file.write(content)
    file.seek(0)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
    return file
