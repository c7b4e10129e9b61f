"""Run a server as a child of this process: start it, await it, watch it, log its end, stop it.

Servers of ``spec.environments`` and of served models run like this. Each has a process group of its own, so that its
own children end with it, and its output goes into the log of the process that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from plaudit_sandbox.lifetime import end_program_with_us
from plaudit_wire.errors import RefusedError
from plaudit_wire.frames import signal_name
from plaudit_wire.logs import get_logger
from plaudit_workers.process import RESTARTED

logger = get_logger(__name__)
_CHECK_STARTING_EVERY_S = 0.25
_CHECK_HEALTHY_EVERY_S = 2.0
_UNRESPONSIVE_AFTER_S = 30.0
"""A server that was healthy and has not responded for so long is restarted."""
_GRACE_S = 20.0
"""Time to finish requests after SIGTERM; less than the supervisor's own grace."""
_TAIL_BYTES = 2000
IsReady = Callable[[], Awaitable[bool]]


class ServerDiedError(Exception):
    """The server's process ended or does not respond; a restart may help."""


class ChildServer:
    """Watch one running server until ``stop`` is set; ``name`` is for messages."""

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, stop: asyncio.Event, log_file: Path | None
    ) -> None:
        self._name = name
        self._process = process
        self._log_file = log_file
        self._ended = asyncio.ensure_future(process.wait())
        self._stopped = asyncio.ensure_future(stop.wait())

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        return self._process.returncode

    @property
    def killed_by(self) -> str:
        """Return the name of the signal that ended it; empty for none."""
        return signal_name(-self.exit_code) if self.exit_code is not None and self.exit_code < 0 else ""

    async def until_ready(
        self, is_ready: IsReady, *, within_s: float = math.inf
    ) -> Literal["ready", "stopped", "ended", "late"]:
        """Wait until the server takes requests, ends, is late, or is no longer wanted."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        while not self._stopped.done():
            if self._ended.done():
                return "ended"
            if await is_ready():
                return "ready"
            if loop.time() > deadline:
                return "late"
            await self._pause(_CHECK_STARTING_EVERY_S)
        return "stopped"

    async def watch(self, is_healthy: IsReady | None = None) -> None:
        """Return once ``stop`` is set; raise ``ServerDiedError`` if the server ended, or was not healthy for 30 s."""
        loop = asyncio.get_running_loop()
        healthy_s = loop.time()
        while not self._stopped.done():
            if self._ended.done():
                log = f"; its log: {self._log_file}" if self._log_file else ""
                raise ServerDiedError(f"{self._name} ended with exit code {self.exit_code}{log}")
            if is_healthy is not None and await is_healthy():
                healthy_s = loop.time()
            elif is_healthy is not None and loop.time() - healthy_s > _UNRESPONSIVE_AFTER_S:
                raise ServerDiedError(f"{self._name} has not responded for {_UNRESPONSIVE_AFTER_S:.0f} s")
            await self._pause(None if is_healthy is None else _CHECK_HEALTHY_EVERY_S)

    async def stop(self) -> None:
        """Send SIGTERM, allow time to finish, then kill its process group."""
        self._stopped.cancel()
        if not self._ended.done():
            self._process.terminate()
            await asyncio.wait({self._ended}, timeout=_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        logger.info("server ended", server=self._name, exit_code=await self._ended)

    def start_failure(self, message: str) -> Exception:
        """Return the error of a server that did not start; the message ends with its log.

        The first start refuses the job. A restart dies: what fails now was possible before, so another may help.
        """
        failure = ServerDiedError if os.environ.get(RESTARTED) else RefusedError
        return failure(f"{message}. Its log ends:\n{self._log_end()}")

    async def _pause(self, seconds: float | None) -> None:
        """Sleep, but not beyond a stop or the server's end."""
        waiting: set[asyncio.Future[Any]] = {self._ended, self._stopped}
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)

    def _log_end(self) -> str:
        if self._log_file is None or not self._log_file.exists():
            return "(no log)"
        return self._log_file.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").rstrip()


@contextlib.asynccontextmanager
async def child_server(
    name: str, command: Sequence[str], environment: Mapping[str, str], stop: asyncio.Event, log_file: Path | None
) -> AsyncIterator[ChildServer]:
    """Start a server that ends with the body, and with this process; raise ``RefusedError`` if it cannot be started."""
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(log_file.open("ab")) if log_file else None
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_program_with_us(),
            )
        except OSError as error:
            raise RefusedError(f"{name}: {command[0]} cannot be started: {error}") from error
    server = ChildServer(name, process, stop, log_file)
    try:
        yield server
    finally:
        await server.stop()
