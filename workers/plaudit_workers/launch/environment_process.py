"""Run one server of ``spec.environments`` under ``plaudit run``.

The supervisor starts this process anew when its server ends; the port stays the same.
"""

from __future__ import annotations

import asyncio
import os
from urllib.parse import urlsplit

from plaudit_job.load import load_job
from plaudit_reward.functions.function import function_environment
from plaudit_wire.logs import get_logger
from plaudit_workers.job_start import is_reachable
from plaudit_workers.launch.child_server import child_server
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
    url, name = os.environ[server.variable], f"environment {server.name}"
    address, path = urlsplit(url), server.readiness.path
    environment = function_environment(os.environ) | {"PORT": str(address.port), "HOST": str(address.hostname)}
    async with child_server(name, server.command, environment, stop, settings.log_file) as child:
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
            await child.watch()
    return EXIT_DONE
