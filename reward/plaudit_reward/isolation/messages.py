"""Define the messages between a pool and its child processes, and encode them.

| message | from | to | meaning |
| --- | --- | --- | --- |
| ``LoadFunction`` | pool | child | the first message: the function to load, the number of slots |
| ``FunctionLoaded`` / ``FunctionRefused`` | child | pool | the answer |
| ``Work`` | pool | child | call the function once |
| ``Drop`` | pool | child | do not run these works, or cancel them where that is possible |
| ``Started`` / ``Finished`` | child | pool | one work began / ended: the time limit runs between them |
| ``Dropped`` | child | pool | these works were dropped before they began |
| ``Blocked`` | child | pool | one work blocks the event loop |

They travel in frames (``plaudit_wire.frames``).
"""

from __future__ import annotations

import socket
import threading
from typing import Annotated, Any

import msgspec

from plaudit_reward.functions.result import Description, Target
from plaudit_reward.scorer import Score
from plaudit_wire.frames import READ_BYTES, Frames, frame
from plaudit_wire.records import Sample


class LoadFunction(msgspec.Struct, frozen=True, tag="Load", array_like=True):
    """Name the function to load."""

    target: Target
    slots: int
    """Limit on concurrent works of the child (threads, or tasks of its event loop)."""
    files: dict[str, bytes] = {}
    """The content of its file and of the modules beside it, see ``user_files``."""


class FunctionLoaded(msgspec.Struct, frozen=True, tag="Loaded", array_like=True):
    """Report that the function is loaded."""

    description: Description


class FunctionRefused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Report that the function cannot be used; ``message`` has the reason and the remedy."""

    message: str


class Work(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Call the function once."""

    id: int
    samples: list[Sample]
    values: Any = None
    """A group's values, or the values of one sample's scorers by name."""
    post_process: bool = False
    """Call the class's ``post_process_scores`` with ``values``."""
    traceparent: str = ""
    """The trace of the sample, or of the group's first one; empty: nothing is traced."""


def num_scores(work: Work) -> int:
    """Return how many scores a work must have."""
    return len(work.values) if work.post_process else len(work.samples)


class Drop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Drop works that are no longer needed."""

    ids: list[int]


class Started(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Report that a work began."""

    id: int
    thread: int = 0
    """Native id of the thread that runs it."""
    process_cpu_s: float = 0.0
    """CPU seconds of the whole child so far."""
    thread_cpu_s: float = 0.0
    """CPU seconds of that thread so far."""


class Finished(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Report that a work ended: one score a sample."""

    id: int
    seconds: float
    scores: list[Score]


class Dropped(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Report works that will not begin."""

    ids: list[int]


class Blocked(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Report that a work has blocked the event loop for ``seconds``."""

    id: int
    """Of the work; -1 when no work is to blame."""
    seconds: float
    where: str
    """``function (file:line)`` that it runs."""


FromPool = LoadFunction | Work | Drop
FromChild = FunctionLoaded | FunctionRefused | Started | Finished | Dropped | Blocked
_from_pool = msgspec.msgpack.Decoder(list[FromPool])
_one_from_pool = msgspec.msgpack.Decoder(FromPool)
_each = msgspec.msgpack.Decoder(list[msgspec.Raw])
_MOST_MESSAGES = 1024
messages_from_child = msgspec.msgpack.Decoder(
    Annotated[list[FromChild], msgspec.Meta(max_length=_MOST_MESSAGES)]
).decode
"""Decodes one frame's body, in the pool; a child sends a few messages at a time."""


class Channel:
    """Hold the child's end: blocking reads by one thread, writes by any."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._frames = Frames()
        self._lock = threading.Lock()

    def send(self, messages: list[FromChild]) -> None:
        """Send the messages in one frame."""
        data = frame(messages)
        with self._lock:
            self.connection.sendall(data)

    def receive(self, *, wait: bool = True) -> list[FromPool]:
        """Return the messages that have arrived; with ``wait``, block for some. ``EOFError``: the pool is gone."""
        flags = 0 if wait else socket.MSG_DONTWAIT
        while True:
            try:
                data = self.connection.recv(READ_BYTES, flags)
            except BlockingIOError:
                return []
            if not data:
                raise EOFError
            messages = [message for body in self._frames.feed(data) for message in self._decoded(body)]
            if messages or not wait:
                return messages

    def _decoded(self, body: bytes) -> list[FromPool]:
        """Return a frame's messages, and report a work that cannot be read as ended: it costs its own sample alone."""
        try:
            return _from_pool.decode(body)
        except msgspec.ValidationError:
            return [message for each in _each.decode(body) if (message := self._one(each)) is not None]

    def _one(self, body: msgspec.Raw) -> FromPool | None:
        try:
            message: FromPool = _one_from_pool.decode(body)
        except msgspec.ValidationError as error:
            _, number, samples, values, post_process, *_ = msgspec.msgpack.decode(body)
            score = Score.failed("data_error", f"a sample that the function's process cannot read: {error}")
            self.send([Started(number), Finished(number, 0.0, [score] * len(values if post_process else samples))])
            return None
        return message
