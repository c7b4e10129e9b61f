"""Start a child process on one end of a connection, and read what it prints.

For the children of pools and of agents.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from typing import cast

from plaudit_reward.functions.function import function_environment
from plaudit_sandbox.lifetime import start_module
from plaudit_wire.logs import get_logger

logger = get_logger(__name__)


def start_child(module: str) -> tuple[subprocess.Popen[bytes], socket.socket, int]:
    """Start a module for users' functions; return it, our end of its connection and of the pipe that it prints to.

    Texts have the same hashes in each process, so that a resumed run walks through sets of them in the same order.
    Raises as ``start_module``.
    """
    read_end, write_end = os.pipe()
    environment = {"PYTHONHASHSEED": "0", **function_environment(os.environ)}
    try:
        process, ours = start_module(module, environment, write_end, write_end)
    except OSError:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    return process, ours, read_end


_TAIL_BYTES = 2_000
_LINES_PER_WINDOW = 50
_WINDOW_S = 10.0
_LINE_CHARACTERS = 500
_PAUSE_AFTER_BYTES = 4 << 20
_PAUSE_S = 0.05
"""A child that prints more is slowed down to 80 MB/s: reading a flood would take a core from the event loop."""


class Output(asyncio.Protocol):
    """Log a part of a child's standard output and error, and keep the end for the message when the child dies.

    A flood of it does not affect others. ``event`` is the message of the log, ``field`` its field with the name.
    """

    def __init__(self, name: str, event: str = "reward function printed", field: str = "scorer") -> None:
        self._name = name
        self._event = event
        self._field = field
        self._tail = b""
        self._begun = b""
        self._transport: asyncio.ReadTransport | None = None
        self._window_ends = 0.0
        self._num_logged = 0
        self._unpaused_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the open pipe."""
        # A cast: the transports of uvloop, which Ray's actors use, are no subclasses of asyncio's.
        self._transport = cast(asyncio.ReadTransport, transport)

    def data_received(self, data: bytes) -> None:
        """Log the first lines of each ten seconds and keep the tail."""
        self._tail = (self._tail + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]
        now = time.monotonic()
        if now >= self._window_ends:
            self._window_ends, self._num_logged = now + _WINDOW_S, 0
        if self._num_logged < _LINES_PER_WINDOW:
            *lines, rest = (self._begun + data).split(b"\n", _LINES_PER_WINDOW - self._num_logged)
            self._begun = rest[:_LINE_CHARACTERS]
            self._num_logged += len(lines)
            for line in lines:
                if line.strip():
                    text = line[:_LINE_CHARACTERS].decode(errors="replace")
                    logger.info(self._event, **{self._field: self._name, "line": text})
        else:
            self._begun = b""
        self._unpaused_bytes += len(data)
        if self._unpaused_bytes >= _PAUSE_AFTER_BYTES and self._transport is not None:
            self._unpaused_bytes = 0
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def tail(self) -> str:
        """Return the last of it as text."""
        return self._tail.decode(errors="replace").strip()

    def close(self) -> None:
        """Stop reading."""
        if self._transport is not None:
            self._transport.close()
