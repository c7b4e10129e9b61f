"""Frame the messages between a process and its child processes, and name the signals that end them.

A frame is four bytes of length (little endian) and the msgpack of a list of messages: many small messages in one
system call.
"""

from __future__ import annotations

import signal
import struct
from typing import Any

import msgspec

READ_BYTES = 1 << 20
"""Bytes to read from a connection at a time."""
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


def frame(messages: list[Any]) -> bytes:
    """Return one frame with these messages."""
    body = _encoder.encode(messages)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Splits a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; return the bodies of the frames that are complete now."""
        self._buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            end = start + _LENGTH.size + _LENGTH.unpack_from(self._buffer, start)[0]
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return bodies


def signal_name(number: int) -> str:
    """Return a signal's name, such as ``SIGSEGV`` or ``SIGRTMIN+6``; Python names only two of the real-time ones."""
    try:
        return signal.Signals(number).name
    except ValueError:
        pass
    if signal.SIGRTMIN < number < signal.SIGRTMAX:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"
    return f"signal {number}"


def how_ended(status: int) -> str:
    """Return how a process ended, from its exit code, or the negative of the signal that killed it."""
    if status >= 0:
        return f"ended with exit code {status}"
    return f"was killed by {signal_name(-status)}" + (" (out of memory?)" if -status == signal.SIGKILL else "")
