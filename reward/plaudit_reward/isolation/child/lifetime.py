"""End a child process with the process that it works for. Called in the child. Linux only."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import threading

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent, ``parent``, ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it ended before the line above


def end_when_closed(connection: socket.socket) -> None:
    """Kill this process and all that it started as soon as the other side closes the connection."""
    threading.Thread(target=_end_when_closed, args=(connection,), daemon=True).start()


def _end_when_closed(connection: socket.socket) -> None:
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.poll()
    os.killpg(os.getpgrp(), signal.SIGKILL)
