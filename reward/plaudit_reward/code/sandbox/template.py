"""Load Python's modules in a process that forks a confined process for every run of a program.

It never holds data of a run: the program's process, once forked, reads its program from a file in memory that the
supervising process made. So nothing of one sample can be found in the memory of another's program.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
from typing import NamedTuple, NoReturn

from plaudit_reward.code.sandbox.child import run_and_leave
from plaudit_reward.code.sandbox.confinement.seccomp import prctl

_PR_SET_PDEATHSIG = 1
_FORK = b"f"
_NUM_DESCRIPTORS = 4
_PID = struct.Struct("=i")
_EXIT = struct.Struct("=iddQ")


class ProgramProcess(NamedTuple):
    """A program's process."""

    pid: int
    handle: int
    """A file descriptor (``pidfd``) that cannot come to mean another process."""


class Exit(NamedTuple):
    """The end of a program's process."""

    status: int
    """As ``waitpid`` returns it."""
    cpu_s: float
    peak_bytes: int


class Template:
    """Fork programs, from the supervising process."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def fork(self, task: int, stdin: int, stdout: int, stderr: int) -> ProgramProcess:
        """Fork a program's process.

        Args:
            task: file with the ``Run``.

        Raises:
            EOFError: the template process is gone, or could not fork.
        """
        try:
            socket.send_fds(self.connection, [_FORK], [task, stdin, stdout, stderr])
            data, descriptors, _, _ = socket.recv_fds(self.connection, _PID.size, 1)
        except OSError as error:
            raise EOFError from error
        if not data or len(descriptors) != 1:
            raise EOFError
        return ProgramProcess(_PID.unpack(data)[0], descriptors[0])

    def exit(self) -> Exit:
        """Return how the process ended, once ``connection`` can be read; raise ``EOFError`` without the template."""
        try:
            data = self.connection.recv(_EXIT.size)
        except OSError as error:
            raise EOFError from error
        if len(data) < _EXIT.size:
            raise EOFError
        status, user_s, system_s, peak_bytes = _EXIT.unpack(data)
        return Exit(status, user_s + system_s, peak_bytes)


def start_template(ruleset: int | None) -> Template:
    """Fork this process into a template, before it has held data of any run."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    supervisor = os.getpid()
    if os.fork() == 0:
        try:
            ours.close()
            _serve(theirs, ruleset, supervisor)
        finally:
            os._exit(1)
    theirs.close()
    return Template(ours)


def _serve(connection: socket.socket, ruleset: int | None, supervisor: int) -> NoReturn:
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)  # it ended before the line above
    template = os.getpid()
    _close_all_but(connection.fileno(), ruleset)
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, 1, _NUM_DESCRIPTORS)
        if not data or len(descriptors) != _NUM_DESCRIPTORS:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            task, *streams = descriptors
            run_and_leave(task, (streams[0], streams[1], streams[2]), ruleset, template)
        for descriptor in descriptors:
            os.close(descriptor)
        handle = os.pidfd_open(pid)
        socket.send_fds(connection, [_PID.pack(pid)], [handle])
        os.close(handle)
        _, status, usage = os.wait4(pid, 0)
        connection.send(_EXIT.pack(status, usage.ru_utime, usage.ru_stime, usage.ru_maxrss * 1024))


def _close_all_but(connection: int, ruleset: int | None) -> None:
    """Close what the supervising process has open, such as its connection to the worker."""
    kept = sorted({0, 1, 2, connection, ruleset or 0})
    for before, after in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(before + 1, after)
