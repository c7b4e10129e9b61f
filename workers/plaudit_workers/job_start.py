"""Load the job of a rollout worker or a trainer, and wait until its environments (``spec.environments``) answer."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from urllib.parse import urlsplit

from plaudit_job.load import load_job
from plaudit_job.spec.rljob import RLJob, url_variable
from plaudit_reward.http import HttpClient, NoResponseError
from plaudit_wire.errors import CallTimeoutError, RefusedError
from plaudit_wire.logs import get_logger

logger = get_logger(__name__)
_ANSWER_WITHIN_S = 5.0
_CHECK_EVERY_S = 0.5


def load_training_job(path: Path) -> RLJob:
    """Load a job that generates and trains; refuse one that only scores."""
    job = load_job(path)
    if not job.spec.trains:
        raise RefusedError(
            f"{path}: spec.rollout and spec.trainer are missing, so this job only scores samples and has neither "
            "rollout workers nor a trainer. Start reward workers only, or add both sections"
        )
    return job


def environment_url(name: str) -> str:
    """Return the URL of an environment of the job."""
    url = os.environ.get(url_variable(name), "")
    if not url:
        raise RefusedError(f"{url_variable(name)} is not set: 'plaudit run' and the operator set it for rollouts")
    return url


async def await_environments(job: RLJob) -> None:
    """Wait until all environments of the job answer, however long that takes."""
    for server in job.spec.environments:
        url, waiting = environment_url(server.name), False
        while not await is_reachable(url, server.readiness.path):
            if not waiting:
                logger.info("waiting for an environment", environment=server.name, url=url)
                waiting = True
            await asyncio.sleep(_CHECK_EVERY_S)


async def is_reachable(url: str, path: str) -> bool:
    """Return True if GET of ``path`` has a status below 400 or, without a path, the port accepts connections."""
    if not path:
        address = urlsplit(url)
        return await accepts(address.hostname, address.port, _ANSWER_WITHIN_S)
    client = HttpClient(max_connections=1)
    try:
        return (await client.get(f"{url}{path}", _ANSWER_WITHIN_S)).status < 400
    except (NoResponseError, CallTimeoutError):
        return False
    finally:
        await client.close()


async def accepts(host: str | None, port: int | None, within_s: float) -> bool:
    """Return True if a port accepts connections."""
    try:
        async with asyncio.timeout(within_s):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
