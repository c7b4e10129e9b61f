"""Announce a scoring service: its reward workers write their offer to Redis while they run.

The workers score samples of any origin; only this record makes a run a service.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from plaudit_wire.codec import encode
from plaudit_wire.messages import Service
from plaudit_wire.outage import OUTAGE
from plaudit_workers.job.spec.rljob import RLJob
from plaudit_workers.scoring.group_scope import has_group_scorers
from plaudit_workers.stream.connection import Transport
from plaudit_workers.supervision import Supervised

_OFFER_EVERY_S = 10.0
"""Seconds between writes of the offer: after a loss of data, Redis has it again within this time."""
_QUEUED_PER_SLOT = 2
"""Samples that a session may have in work for each slot of all workers, so that no worker runs out of work."""


def service_of(job: RLJob) -> Service:
    """Return the offer of a job without rollout and trainer."""
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
    """Offer the service to clients while the context lasts; a job with a trainer offers nothing."""
    if job.spec.trains:
        yield
        return
    async with Supervised() as tasks:
        tasks.start(_offer(transport, encode(service_of(job))))
        yield


async def _offer(transport: Transport, service: bytes) -> None:
    while True:
        try:
            await transport.commands.set(transport.names.service, service)
        except OUTAGE as error:
            transport.outages.report(error)
        await asyncio.sleep(_OFFER_EVERY_S)
