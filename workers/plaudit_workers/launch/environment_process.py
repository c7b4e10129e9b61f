"""Run one server of ``spec.environments`` under ``plaudit run``: start its command, wait for it, end with it.

The supervisor starts this process anew when its server ends; the port stays the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from plaudit_job.load import load_job
from plaudit_job.spec.rljob import EnvironmentServerSpec
from plaudit_reward.functions.function import function_environment
from plaudit_sandbox.lifetime import end_program_with_us
from plaudit_wire.errors import RefusedError
from plaudit_wire.logs import get_logger
from plaudit_workers.job_start import is_reachable
from plaudit_workers.process import EXIT_DONE, RESTARTED, ProcessSettings

logger = get_logger(__name__)

NAME = "PLAUDIT_ENVIRONMENT_SERVER"
"""Variable with the name of the environment that this process runs."""
_CHECK_EVERY_S = 0.2
_END_WITHIN_S = 10.0
_TAIL_BYTES = 2000


class EnvironmentDiedError(Exception):
    """The server's process ended; a restart may help."""


async def serve(settings: ProcessSettings, stop: asyncio.Event) -> int:
    """Run the server until ``stop`` is set.

    Raises:
        RefusedError: it ended, or was not ready in time, at its first start.
        EnvironmentDiedError: it ended later, or at the start after that: a request may kill it before it is seen ready.
    """
    name = os.environ[NAME]
    server = next(each for each in load_job(settings.job_path).spec.environments if each.name == name)
    url = os.environ[server.variable]
    child = await _start(server, url, settings.log_file)
    ended = asyncio.ensure_future(child.wait())
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await _until_ready(server, url, ended, stopped, settings.log_file)
        logger.info("serving", environment=server.name, url=url, pid=child.pid)
        await _first(ended, stopped)
        if not stopped.done():
            log = f"; its log: {settings.log_file}" if settings.log_file else ""
            raise EnvironmentDiedError(f"environment {server.name} ended with exit code {child.returncode}{log}")
    finally:
        stopped.cancel()
        await _end(child, ended)
    return EXIT_DONE


async def _start(server: EnvironmentServerSpec, url: str, log_file: Path | None) -> asyncio.subprocess.Process:
    address = urlsplit(url)
    own = {"PORT": str(address.port), "HOST": str(address.hostname)}
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(log_file.open("ab")) if log_file else None
        try:
            return await asyncio.create_subprocess_exec(
                *server.command,
                env=function_environment(os.environ) | own,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_program_with_us(),
            )
        except OSError as error:
            raise RefusedError(f"environment {server.name}: {server.command[0]} cannot be started: {error}") from error


async def _until_ready(
    server: EnvironmentServerSpec,
    url: str,
    ended: asyncio.Future[int],
    stopped: asyncio.Future[Any],
    log_file: Path | None,
) -> None:
    deadline = asyncio.get_running_loop().time() + server.readiness.timeout_seconds
    failure = EnvironmentDiedError if os.environ.get(RESTARTED) else RefusedError
    while not await is_reachable(url, server.readiness.path):
        if ended.done():
            raise failure(
                f"environment {server.name} ended with exit code {ended.result()} at its start. Its log ends:\n"
                f"{_tail(log_file)}"
            )
        if asyncio.get_running_loop().time() > deadline:
            raise failure(
                f"environment {server.name} was not ready at {url}{server.readiness.path} within "
                f"{server.readiness.timeout_seconds:g} s (readiness). It must listen on $HOST:$PORT. Its log ends:\n"
                f"{_tail(log_file)}"
            )
        await _first(ended, stopped, timeout_s=_CHECK_EVERY_S)
        if stopped.done():
            return


async def _first(*futures: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


def _tail(log_file: Path | None) -> str:
    if log_file is None or not log_file.exists():
        return ""
    return log_file.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")


async def _end(child: asyncio.subprocess.Process, ended: asyncio.Future[int]) -> None:
    """Send SIGTERM, allow time to end, then kill its process group."""
    if not ended.done():
        child.terminate()
        await asyncio.wait({ended}, timeout=_END_WITHIN_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    await ended
