"""Serve one address on this machine for all servers of a model, for functions that expect verl's router.

Requests go to the least busy healthy server, with the servers' token. It listens on the loopback address only.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from plaudit_reward.scorer import Attempt
from plaudit_reward.served.pool import ServerPool
from plaudit_wire.errors import CallTimeoutError, InfrastructureError

_LARGEST_BODY_BYTES = 64 << 20


class LocalRouter:
    """Forward requests to a pool; responses arrive whole, also those that the caller wants streamed.

    Args:
        limit_s: seconds of one request; the caller's own limit is usually shorter.
    """

    def __init__(self, pool: ServerPool, limit_s: float) -> None:
        self._pool = pool
        self._limit_s = limit_s
        self._runner: web.AppRunner | None = None

    async def open(self) -> str:
        """Start to look for servers and to listen; return ``host:port``. Raises as ``ServerPool.open``."""
        await self._pool.open()
        application = web.Application(client_max_size=_LARGEST_BODY_BYTES)
        application.router.add_route("*", "/{path:.*}", self._forward)
        # A caller that gives up must not keep a server busy.
        self._runner = web.AppRunner(application, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        return f"{host}:{port}"

    @property
    def ready(self) -> bool:
        """Return True while some server is healthy."""
        return self._pool.any_healthy

    async def close(self) -> None:
        """Stop listening, and close the connections to the servers."""
        if self._runner is not None:
            await self._runner.cleanup()
        await self._pool.close()

    async def _forward(self, request: web.Request) -> web.Response:
        if request.method not in {"GET", "POST"}:
            return _failure(405, f"{request.method} is not forwarded; use GET or POST")
        attempt = Attempt(self._limit_s)
        try:
            if request.method == "GET":
                _, response = await self._pool.get(request.raw_path, attempt)
            else:
                _, response = await self._pool.post(request.raw_path, await request.read(), attempt)
        except CallTimeoutError as error:
            return _failure(504, str(error))
        except InfrastructureError as error:
            return _failure(502, str(error))
        kind = response.headers.get("Content-Type", "application/json")
        return web.Response(status=response.status, body=response.body, headers={"Content-Type": kind})


def _failure(status: int, message: str) -> web.Response:
    body = msgspec.json.encode({"error": {"type": "router", "message": message}})
    return web.Response(status=status, body=body, content_type="application/json")
