"""Give a user's environment class the machine of its sample: run commands in it, and copy files in and out.

The class runs in the sample's process, which has no way to a machine: the rollout holds it, and answers each request.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from plaudit_wire.errors import InfrastructureError
from plaudit_workers.agents.messages import MachineReply, UseMachine


class CommandResult(NamedTuple):
    """Hold the end of a command."""

    exit_code: int
    """128 + the number of the signal that ended it; 124 at a limit."""
    output: str
    """Standard output and error in the order of writing; of more than 32,000 bytes the first and the last half."""


class SandboxHandle:
    """Use the machine of one sample.

    Methods block, as plain methods of an environment may. An async method calls them by ``asyncio.to_thread``. They
    raise ``ValueError`` for what cannot be done, and ``InfrastructureError`` for a machine that broke: leave the latter
    to the rollout, and the sample ends without a score.
    """

    def __init__(self) -> None:
        self._send: Callable[[UseMachine], None] | None = None
        self._loop_thread: int | None = None
        self._numbers = itertools.count()
        self._awaited: dict[int, concurrent.futures.Future[MachineReply]] = {}

    def connect(self, send: Callable[[UseMachine], None]) -> None:
        """Send requests by ``send``, from any thread; call this on the thread that ``receive`` is called on."""
        self._send, self._loop_thread = send, threading.get_ident()

    def receive(self, reply: MachineReply) -> None:
        """Take the answer to a request."""
        self._awaited.pop(reply.id).set_result(reply)

    def exec(self, command: str, timeout_s: float = 60.0) -> CommandResult:
        """Run a command of bash in the task's working folder, to its end or ``timeout_s``; nothing of it runs on."""
        reply = self._ask("exec", command, timeout_s=timeout_s)
        return CommandResult(reply.exit_code, reply.output)

    def upload(self, path: str, content: bytes | str) -> None:
        """Write a file of the machine, with the folders above it; text as UTF-8."""
        self._ask("upload", path, content.encode() if isinstance(content, str) else content)

    def download(self, path: str) -> bytes:
        """Return the content of a file of the machine, of at most 1 MiB."""
        return self._ask("download", path).content

    def _ask(self, method: Any, text: str, content: bytes = b"", timeout_s: float = 60.0) -> MachineReply:
        if self._send is None:
            raise InfrastructureError("the machine can be used from reset on, and not before")
        if threading.get_ident() == self._loop_thread:
            raise RuntimeError(f"sandbox.{method} blocks: in an async method use await asyncio.to_thread(…)")
        number = next(self._numbers)
        answer = self._awaited[number] = concurrent.futures.Future()
        self._send(UseMachine(number, method, str(text), bytes(content), float(timeout_s)))
        reply = answer.result()
        if reply.failed:
            raise InfrastructureError(reply.problem)
        if reply.problem:
            raise ValueError(reply.problem)
        return reply
