"""Start child processes, and end them with the process that they work for, however that one ends. Linux only."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial

from plaudit_sandbox.privileges import end_with


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
    """Kill this child and all that it started as soon as the other side closes the connection."""

    def wait() -> None:
        poll = select.poll()
        poll.register(connection, select.POLLRDHUP)
        poll.poll()
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
