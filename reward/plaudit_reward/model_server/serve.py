"""Serve a loaded model, then drain: after a stop, refuse new requests, answer the accepted ones and end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import uvicorn

from plaudit_metrics.service.http_server import HttpServer, listening_socket
from plaudit_reward.model_server.access import Access
from plaudit_reward.model_server.api import ModelApi
from plaudit_reward.model_server.batcher import Batcher, BatchLimits, Forward, Occupy
from plaudit_reward.model_server.series import ModelServerSeries
from plaudit_wire.logs import get_logger

if TYPE_CHECKING:
    from plaudit_reward.model_server.model import Classifier

logger = get_logger(__name__)

_IDLE_CONNECTION_S = 75
_LAST_ANSWERS_WITHIN_S = 10
"""Pause at the end of a drain, so that results reach their clients."""


@dataclass(frozen=True)
class Address:
    """The server's address and the name of its model."""

    host: str
    port: int
    name: str
    """Name of the model, in ``/v1/models`` and in responses."""


async def serve(
    classifier: Classifier,
    address: Address,
    limits: BatchLimits,
    stop: asyncio.Event,
    forward: Forward | None = None,
    access: Access | None = None,
    occupy: Occupy | None = None,
) -> None:
    """Serve a loaded model until ``stop`` is set and all accepted requests are answered.

    The server listens only after the model is loaded: a client that can connect reaches a ready server.

    ``forward`` and ``occupy``, if given, replace the classifier's own.

    Raises:
        OSError: the port is taken.
        Exception: raised by a forward pass.
    """
    series = ModelServerSeries()
    batcher = Batcher(forward or classifier.logits, _limits(limits, classifier), series, occupy or classifier.occupy)
    api = ModelApi(classifier, batcher, address.name, series, access)
    with listening_socket(address.host, address.port) as listener:
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
