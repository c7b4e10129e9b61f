"""Serve ``/healthz``, ``/readyz`` and ``/metrics`` of the operator, on one thread of its own.

The port is open to the cluster. So a connection lives for a few seconds at most, however slow its client is; if there
are too many the oldest is closed; and ``/metrics`` is rendered at most once a second.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from plaudit_operator.runtime.background_loop import BackgroundLoop

Check = Callable[[], str]
"""Returns what is wrong; empty if nothing is."""

_MOST_CONNECTIONS = 256
_CONNECTION_ENDS_AFTER_S = 10.0
_METRICS_FRESH_FOR_S = 1.0


class HealthServer:
    """The HTTP server, on all addresses of the pod.

    Args:
        port: TCP port; 0 takes a free one.
        alive: returns why the process should be restarted.
        ready: returns why the process does not work yet.
        registry: the series of ``/metrics``.
    """

    def __init__(self, port: int, alive: Check, ready: Check, registry: CollectorRegistry) -> None:
        self._alive = alive
        self._ready = ready
        self._registry = registry
        self._metrics = b""
        self._metrics_at = float("-inf")
        self._connections: deque[web.RequestHandler] = deque()
        self._background = BackgroundLoop("health")
        self.port = self._background.submit(self._start(port)).result()
        """TCP port that it listens on."""

    def close(self) -> None:
        """Close the port and all connections."""
        self._background.submit(self._stop()).result()
        self._background.close()

    async def _start(self, port: int) -> int:
        application = web.Application(client_max_size=0)
        application.router.add_get("/healthz", self._serve_alive)
        application.router.add_get("/readyz", self._serve_ready)
        application.router.add_get("/metrics", self._serve_metrics)
        self._runner = web.AppRunner(application, access_log=None, keepalive_timeout=_CONNECTION_ENDS_AFTER_S)
        await self._runner.setup()
        self._server = await self._background.loop.create_server(self._connection, None, port)
        by_family = sorted(self._server.sockets, key=lambda listening: listening.family)  # port 0: IPv4 and 6 differ
        return int(by_family[0].getsockname()[1])

    async def _stop(self) -> None:
        self._server.close()
        await self._runner.cleanup()

    def _connection(self) -> asyncio.Protocol:
        """Return the protocol of a new connection, which is closed after its time, or when 256 newer ones came."""
        assert self._runner.server is not None
        protocol: web.RequestHandler = self._runner.server()
        self._connections.append(protocol)
        self._background.loop.call_later(_CONNECTION_ENDS_AFTER_S, self._end, protocol)
        if len(self._connections) > _MOST_CONNECTIONS:
            self._end(self._connections[0])
        return protocol

    def _end(self, protocol: web.RequestHandler) -> None:
        if protocol in self._connections:
            self._connections.remove(protocol)
        if protocol.transport is not None:
            protocol.transport.abort()

    async def _serve_alive(self, _: web.Request) -> web.Response:
        return _check_response(self._alive())

    async def _serve_ready(self, _: web.Request) -> web.Response:
        return _check_response(self._ready())

    async def _serve_metrics(self, _: web.Request) -> web.Response:
        if time.monotonic() - self._metrics_at >= _METRICS_FRESH_FOR_S:
            self._metrics = generate_latest(self._registry)
            self._metrics_at = time.monotonic()
        return web.Response(body=self._metrics, headers={"Content-Type": CONTENT_TYPE_LATEST})


def _check_response(problem: str) -> web.Response:
    return web.Response(text=f"{problem or 'ok'}\n", status=503 if problem else 200)
