"""End a child process with the process that it works for, however that one ends. Called in the child. Linux only."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Callable
from functools import partial

from plaudit_sandbox.confinement import prctl

_PR_SET_PDEATHSIG = 1


def end_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent, ``parent``, ends.

    A change of user takes it back; an exec keeps it.
    """
    prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)  # it ended before the line above


def end_program_with_us() -> Callable[[], None]:
    """Return the ``preexec_fn`` of a program of somebody else that gets SIGTERM when this process ends."""
    return partial(end_with, os.getpid(), signal.SIGTERM)


def end_when_closed(connection: socket.socket) -> None:
    """Kill this process and all that it started as soon as the other side closes the connection."""

    def wait() -> None:
        poll = select.poll()
        poll.register(connection, select.POLLRDHUP)
        poll.poll()
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
