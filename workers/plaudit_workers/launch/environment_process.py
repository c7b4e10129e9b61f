"""Run one server of ``spec.environments`` under ``plaudit run``, or all of them for ``plaudit try``.

The supervisor starts this process anew when its server ends; the port stays the same.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from plaudit_job.load import load_job
from plaudit_job.spec.rljob import EnvironmentServerSpec, RLJob
from plaudit_reward.functions.function import function_environment
from plaudit_wire.errors import RefusedError
from plaudit_wire.logs import get_logger
from plaudit_workers.job_start import is_reachable
from plaudit_workers.launch.child_server import ChildServer, child_server
from plaudit_workers.launch.redis import free_port
from plaudit_workers.process import EXIT_DONE, ProcessSettings

logger = get_logger(__name__)
NAME = "PLAUDIT_ENVIRONMENT_SERVER"
"""Variable with the name of the environment that this process runs."""


async def serve(settings: ProcessSettings, stop: asyncio.Event) -> int:
    """Run the server until ``stop`` is set.

    Raise ``RefusedError`` if its first start fails; later, and at the start after that, ``ServerDiedError``: a request
    may kill it before it is seen ready.
    """
    server = next(each for each in load_job(settings.job_path).spec.environments if each.name == os.environ[NAME])
    async with _started(server, os.environ[server.variable], settings.log_file, stop) as child:
        if child is not None:
            await child.watch()
    return EXIT_DONE


@asynccontextmanager
async def environments_of(job: RLJob, folder: Path) -> AsyncIterator[None]:
    """Start the job's environments that no variable names yet, and name them, until the context ends.

    Args:
        folder: holds their logs.
    """
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
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


@asynccontextmanager
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
