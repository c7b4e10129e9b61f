"""Start child processes, and end them with the process that they work for, however that one ends. Linux only.

A process starts by ``start_module``, or as a fork of a process that has loaded what many need: a ``ForkTemplate``.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from plaudit_sandbox.privileges import end_with
from plaudit_wire.frames import READ_BYTES, Frames, frame

Key = TypeVar("Key")
Request = TypeVar("Request")
_MOST_DESCRIPTORS = 64


def inherited_by_python() -> dict[str, str]:
    """Return this process's variables that Python may need to start; the others hold secrets."""
    names = ("LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH")
    return {name: os.environ[name] for name in names if name in os.environ}


def start_module(
    module: str, environment: Mapping[str, str], stdout: int, stderr: int | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a Python module in a session of its own; return it and our end of its connection.

    Its arguments are its end of the connection and our process id, for ``end_with``. Raises ``OSError`` if no process
    can be started (memory, limit of processes).
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
    return process, ours


def kill_with_group(pid: int) -> None:
    """Kill a process, and its group where it leads one, which a new one does not from its first moment on."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, signal.SIGKILL)


def reap(process: subprocess.Popen[bytes]) -> None:
    """Have a killed process waited for, also where the event loop ends that would have done it."""
    if process.poll() is None:
        threading.Thread(target=process.wait, daemon=True).start()


def end_program_with_us() -> Callable[[], None]:
    """Return the ``preexec_fn`` of a program of somebody else that gets SIGTERM when this process ends."""
    return partial(end_with, os.getpid(), signal.SIGTERM)


def end_when_closed(connection: socket.socket) -> None:
    """Kill this child and all that it started as soon as the other side closes the connection.

    What a user's function forks loses the connection, so that the other side sees this child's end at once, and leaves
    by ``end_if_forked``.
    """

    def wait() -> None:
        poll = select.poll()
        poll.register(connection, select.POLLRDHUP)
        poll.poll()
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
    os.register_at_fork(after_in_child=partial(_part_from, connection))


_forked = threading.Event()
"""Set in what a user's function forked."""


def _part_from(connection: socket.socket) -> None:
    connection.close()
    _forked.set()


def end_if_forked(error: BaseException | None = None) -> None:
    """End this process as a program ends, where the user's code that returned or raised had forked it.

    Its result is no result of the call, which goes on in the process that forked.
    """
    if not _forked.is_set():
        return
    status = 1
    try:
        status = _exit_status(error)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _exit_status(error: BaseException | None) -> int:
    """Return the exit status that Python has for an error, and print what Python prints."""
    code: Any = error.code if isinstance(error, SystemExit) else None
    if isinstance(code, int):
        return code & 0xFF
    if code is not None:
        sys.stderr.write(f"{code}\n")
    elif error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(error)
    else:
        return 0
    return 1


class ForkTemplate(ABC, Generic[Request, Key]):
    """Fork this process when the process that it works for requests it; forks share the memory of all that it loaded.

    It must have one thread. A file descriptor comes with each request for a fork. A fork leads a session of its own and
    ends with the template; when it has ended, what it left in its process group is killed.
    """

    def __init__(self, connection: socket.socket, requests: msgspec.msgpack.Decoder[list[Request]]) -> None:
        self.running: dict[int, Key] = {}
        """Process id of each fork → its name, or its number."""
        self._connection = connection
        self._requests = requests
        self._frames = Frames()
        self._descriptors: list[int] = []
        """File descriptors that arrived and wait for their request."""
        self._wakeups: tuple[socket.socket, ...] = ()
        self._poll = select.poll()

    @abstractmethod
    def ended(self, pid: int, key: Key | None, code: int) -> None:
        """Report the end of a child process.

        Args:
            key: Of a fork; None for a child process that was not forked by ``fork``.
            code: Its exit code, or the negative of the signal that killed it.
        """

    def freeze(self) -> None:
        """Prepare for forks, once everything is loaded: what is loaded may have handled signals itself."""
        gc.freeze()  # a collection in a fork would copy all pages that it shares
        self._wakeups = wakeup, wake = socket.socketpair()
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for connection in (self._connection, wakeup):
            self._poll.register(connection, select.POLLIN)

    def wait(self, timeout_s: float | None = None) -> list[Request]:
        """Wait for a request or the end of a child process; return the requests.

        Raises ``EOFError`` once the other side has closed the connection.
        """
        requests: list[Request] = []
        for descriptor, _ in self._poll.poll(None if timeout_s is None else 1e3 * timeout_s):
            if descriptor == self._connection.fileno():
                requests += self.receive()
            else:
                self._wakeups[0].recv(READ_BYTES)
                self._reap()
        return requests

    def receive(self) -> list[Request]:
        """Return the next requests; raise ``EOFError`` once the other side has closed the connection."""
        requests: list[Request] = []
        while not requests:
            data, descriptors, _, _ = socket.recv_fds(self._connection, READ_BYTES, _MOST_DESCRIPTORS)
            if not data:
                raise EOFError
            self._descriptors += descriptors
            requests += [request for body in self._frames.feed(data) for request in self._requests.decode(body)]
        return requests

    def send(self, message: Any) -> None:
        """Send a message; raise ``EOFError`` once the other side has closed the connection."""
        try:
            self._connection.sendall(frame([message]))
        except OSError as error:
            raise EOFError from error

    def fork(self, key: Key) -> int | None:
        """Fork; return None here, and in the fork the file descriptor that came with the request.

        The fork keeps no other descriptor of the template's. Raises ``OSError`` if there is no fork.
        """
        descriptor = self._descriptors.pop(0)
        template = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            os.close(descriptor)
            raise
        if pid:
            os.close(descriptor)
            self.running[pid] = key
            return None
        os.setsid()
        end_with(template)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for connection in (self._connection, *self._wakeups):
            connection.close()
        for other in self._descriptors:
            os.close(other)
        return descriptor

    def send_signal(self, key: Key, number: int) -> None:
        """Send a fork a signal; SIGKILL goes to its process group as well."""
        for pid in [pid for pid, each in self.running.items() if each == key]:
            if number == signal.SIGKILL:
                kill_with_group(pid)
            else:
                os.kill(pid, number)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                pid = ended.si_pid
                kill_with_group(pid)  # before it is reaped: until then no other process can get its id
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                self.ended(pid, self.running.pop(pid, None), code)
