"""Load the job of a process, derive what several of its processes need, and wait until its environments answer.

They do without the scorers and the packages of these (``service.build``).
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from urllib.parse import urlsplit

from plaudit_job.load import load_job
from plaudit_job.spec.rewards import RewardSpec
from plaudit_job.spec.rljob import RLJob, url_variable
from plaudit_reward.functions.function import declares_post_process
from plaudit_reward.http import HttpClient, NoResponseError
from plaudit_wire.errors import CallTimeoutError, RefusedError
from plaudit_wire.logs import get_logger
from plaudit_wire.messages import Service

logger = get_logger(__name__)
_ANSWER_WITHIN_S = 5.0
_CHECK_EVERY_S = 0.5
_QUEUED_PER_SLOT = 2
"""Samples that a session may have in work for each slot of all workers, so that no worker runs out of work."""


def load_training_job(path: Path) -> RLJob:
    """Load a job that generates and trains; refuse one that only scores."""
    job = load_job(path)
    if not job.spec.trains:
        raise RefusedError(
            f"{path}: spec.rollout and spec.trainer are missing, so this job only scores samples and has neither "
            "rollout workers nor a trainer. Start reward workers only, or add both sections"
        )
    return job


def has_group_scorers(reward: RewardSpec) -> bool:
    """Return True if a scorer has group scope or ``post_process_scores``, or values are normalised by group.

    Groups are then scored after their samples, and the trainer admits them accordingly. The files are read, not run.
    """
    return reward.combine.normalize == "group" or any(
        scorer.scope == "group"
        or (scorer.python is not None and declares_post_process(scorer.python.path, scorer.python.function))
        for scorer in reward.rewarding.scorers
    )


def service_of(job: RLJob, scoring: str = "") -> Service:
    """Return the offer of a job without rollout and trainer, whose scorers have this version."""
    reward = job.spec.reward
    workers = reward.workers
    replicas = workers.autoscaling.max_replicas if workers.autoscaling else workers.replicas
    return Service(
        job=job.metadata.name,
        scorers=[scorer.name for scorer in reward.rewarding.scorers],
        group_scorers=has_group_scorers(reward),
        group_deadline_s=reward.group_deadline_seconds,
        room=_QUEUED_PER_SLOT * replicas * workers.max_concurrent_samples,
        kept_share=max((audit.share for audit in reward.auditors.values()), default=0.0),
        scoring=scoring,
    )


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
    async with HttpClient(max_connections=1) as client:
        try:
            return (await client.get(f"{url}{path}", _ANSWER_WITHIN_S)).status < 400
        except (NoResponseError, CallTimeoutError):
            return False


async def accepts(host: str | None, port: int | None, within_s: float) -> bool:
    """Return True if a port accepts connections."""
    try:
        async with asyncio.timeout(within_s):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
