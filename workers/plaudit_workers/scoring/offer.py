"""What makes a run a scoring service: its reward workers say in Redis what they offer, for as long as they live.

The workers score samples whoever admitted them; only this note is a service's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from plaudit_wire.codec import encode
from plaudit_wire.logs import get_logger
from plaudit_wire.messages import Service
from plaudit_workers.job.spec.rljob import RLJob
from plaudit_workers.scoring.group_scope import has_group_scorers
from plaudit_workers.stream.connection import Transport
from plaudit_workers.stream.transitions.scripts import OUTAGE

logger = get_logger(__name__)

_TELL_EVERY_S = 10.0
"""A Redis that has lost everything knows it again after that time."""
_QUEUED_PER_SLOT = 2
"""A session may have so many samples in work for each that all workers can hold, so that none of them runs dry."""


def service_of(job: RLJob) -> Service:
    """What a job without rollout and trainer offers."""
    reward = job.spec.reward
    workers = reward.workers
    replicas = workers.autoscaling.max_replicas if workers.autoscaling else workers.replicas
    return Service(
        job=job.metadata.name,
        scorers=[scorer.name for scorer in reward.scorers],
        group_scorers=has_group_scorers(reward),
        group_deadline_s=reward.group_deadline_seconds,
        room=_QUEUED_PER_SLOT * replicas * workers.max_concurrent_samples,
    )


@contextlib.asynccontextmanager
async def offering(job: RLJob, transport: Transport) -> AsyncIterator[None]:
    """Tells clients of the service while the context lasts; a job with a trainer offers nothing."""
    if job.spec.trains:
        yield
        return
    telling = asyncio.create_task(_tell(transport, encode(service_of(job))))
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


async def _tell(transport: Transport, service: bytes) -> None:
    while True:
        try:
            await transport.commands.set(transport.names.service, service)
        except OUTAGE as error:
            logger.warning("redis is away", error=str(error))
        await asyncio.sleep(_TELL_EVERY_S)
