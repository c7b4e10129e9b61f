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
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

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
