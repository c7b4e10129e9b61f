"""Run a server as a child of this process: start it, await it, watch it, log its end, stop it.

Servers of ``spec.environments`` and of served models run like this. Each has a process group of its own, so that its
own children end with it, and its output goes into the log of the process that started it. The supervisor of a run
starts the process of an environment anew when its server ends; the port stays the same.
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
from urllib.parse import urlsplit

from plaudit_job.load import load_job
from plaudit_job.spec.rljob import EnvironmentServerSpec, RLJob
from plaudit_reward.functions.function import function_environment
from plaudit_sandbox.lifetime import end_program_with_us
from plaudit_wire.errors import RefusedError
from plaudit_wire.frames import signal_name
from plaudit_wire.logs import get_logger
from plaudit_workers.job_start import is_reachable
from plaudit_workers.launch.redis import free_port
from plaudit_workers.process import EXIT_DONE, RESTARTED, ProcessSettings

logger = get_logger(__name__)
_CHECK_STARTING_EVERY_S = 0.25
_CHECK_HEALTHY_EVERY_S = 2.0
_UNRESPONSIVE_AFTER_S = 30.0
"""A server that was healthy and has not responded for so long is restarted."""
_GRACE_S = 20.0
"""Time to finish requests after SIGTERM; less than the supervisor's own grace."""
_TAIL_BYTES = 2000
ENVIRONMENT_VARIABLE = "PLAUDIT_ENVIRONMENT_SERVER"
"""Variable with the name of the environment that this process runs."""
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


async def serve_environment(settings: ProcessSettings, stop: asyncio.Event) -> int:
    """Run one server of ``spec.environments`` under ``plaudit run`` until ``stop`` is set.

    Raise ``RefusedError`` if its first start fails; later, and at the start after that, ``ServerDiedError``: a request
    may kill it before it is seen ready.
    """
    server = next(
        each for each in load_job(settings.job_path).spec.environments if each.name == os.environ[ENVIRONMENT_VARIABLE]
    )
    async with _started(server, os.environ[server.variable], settings.log_file, stop) as child:
        if child is not None:
            await child.watch()
    return EXIT_DONE


@contextlib.asynccontextmanager
async def environments_of(job: RLJob, folder: Path) -> AsyncIterator[None]:
    """Start the job's environments that no variable names yet, and name them, until the context ends.

    Args:
        folder: holds their logs.
    """
    stop = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        for server in job.spec.environments:
            if server.variable in os.environ:
                continue
            if not server.command:
                raise RefusedError(
                    f"spec.environments: {server.name} has no command, so it is not started here. Start it yourself, "
                    f"and set {server.variable} to its URL"
                )
            url = os.environ[server.variable] = f"http://127.0.0.1:{free_port()}"
            stack.callback(os.environ.pop, server.variable, None)
            await stack.enter_async_context(_started(server, url, folder / f"environment-{server.name}.log", stop))
        yield


@contextlib.asynccontextmanager
async def _started(
    server: EnvironmentServerSpec, url: str, log_file: Path | None, stop: asyncio.Event
) -> AsyncIterator[ChildServer | None]:
    """Start a server; yield it once it is ready, None if it was stopped before."""
    name = f"environment {server.name}"
    address, path = urlsplit(url), server.readiness.path
    environment = function_environment(os.environ) | {"PORT": str(address.port), "HOST": str(address.hostname)}
    async with child_server(name, server.command, environment, stop, log_file) as child:
        limit_s = server.readiness.timeout_seconds
        state = await child.until_ready(lambda: is_reachable(url, path), within_s=limit_s)
        if state == "ended":
            raise child.start_failure(f"{name} ended with exit code {child.exit_code} at its start")
        if state == "late":
            raise child.start_failure(
                f"{name} was not ready at {url}{path} within {limit_s:g} s (readiness). It must listen on $HOST:$PORT"
            )
        if state == "ready":
            logger.info("serving", environment=server.name, url=url, pid=child.pid)
        yield child if state == "ready" else None
