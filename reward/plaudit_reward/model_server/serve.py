"""Loads the model, serves it, drains: takes nothing more after a stop, answers what it has taken, ends."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import uvicorn

from plaudit_metrics.service.http_server import HttpServer
from plaudit_reward.model_server.access import Access
from plaudit_reward.model_server.api import Api
from plaudit_reward.model_server.batcher import Batcher, BatchLimits, Forward
from plaudit_reward.model_server.series import Series
from plaudit_wire.logs import get_logger

if TYPE_CHECKING:
    from plaudit_reward.model_server.model import Classifier

logger = get_logger(__name__)

_IDLE_CONNECTION_S = 75
_LAST_ANSWERS_WITHIN_S = 10
"""Of a drain: what is computed has to reach its client."""


@dataclass(frozen=True)
class Address:
    """Where the server listens, and as what."""

    host: str
    port: int
    name: str
    """The model's, in ``/v1/models`` and in answers."""


async def serve(
    classifier: Classifier,
    address: Address,
    limits: BatchLimits,
    stop: asyncio.Event,
    forward: Forward | None = None,
    access: Access | None = None,
) -> None:
    """Serves a loaded model until ``stop`` is set and all that was taken is answered.

    Nothing listens before the model is loaded: who can connect finds a server that is ready.

    Args:
        classifier: tokenises; its model computes, unless ``forward`` is given.
        address: where to listen.
        limits: of queue and batches.
        stop: ends it.
        forward: computes the logits in the classifier's place.
        access: bounds on requests; the default ones if None.

    Raises:
        OSError: the port is taken.
        Exception: whatever a forward pass raised.
    """
    series = Series()
    batcher = Batcher(forward or classifier.logits, _limits(limits, classifier), series)
    api = Api(classifier, batcher, address.name, series, access)
    with socket.create_server((address.host, address.port)) as listener:
        server = HttpServer(
            uvicorn.Config(
                api.application(),
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_keep_alive=_IDLE_CONNECTION_S,
                timeout_graceful_shutdown=_LAST_ANSWERS_WITHIN_S,
            )
        )
        logger.info("serving on %s:%d", *listener.getsockname()[:2])
        answering = asyncio.create_task(server.serve(sockets=[listener]))
        computing = asyncio.create_task(batcher.run())
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({computing, stopped}, return_when=asyncio.FIRST_COMPLETED)
            api.draining = True
            batcher.stop()
            await computing
        finally:
            stopped.cancel()
            server.should_exit = True
            await answering


def _limits(given: BatchLimits, classifier: Classifier) -> BatchLimits:
    if classifier.packs:
        tokens = min(given.max_batch_tokens, classifier.enough_tokens)
        return replace(given, max_batch_tokens=tokens, max_padding=None)
    return given if classifier.batches else replace(given, max_batch_tokens=1)
