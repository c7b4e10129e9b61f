"""Serve ``/healthz``, ``/readyz`` and ``/metrics`` of the operator, on one thread of its own.

The port is open to the cluster. So a connection lives for a few seconds at most, however slow its client is; if there
are too many the oldest is closed; and ``/metrics`` is rendered at most once a second.

``MetricsAccess`` lets only callers read ``/metrics`` whom the API server allows to, by the rules of the controllers
that kubebuilder scaffolds: the caller sends its service account's token, and RBAC decides over the verb ``get`` of the
URL ``/metrics`` (``nonResourceURLs``).
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from plaudit_operator.runtime.kube import KubeError
from plaudit_operator.runtime.threads import BackgroundLoop, Latest
from plaudit_wire.logs import get_logger

logger = get_logger(__name__)
Check = Callable[[], str]
"""Returns what is wrong; empty if nothing is."""
TokenCheck = Callable[[str], bool]
"""Returns True for a bearer token whose owner may read ``/metrics``; raises ``KubeError``. Called on a thread."""
Review = Callable[[str, dict[str, Any]], dict[str, Any]]
"""Posts a review to a path of the API server and returns it with its ``status``. Raises ``KubeError``."""
_REVIEWS_AT_ONCE = 2
_KNOWN_FOR_S = 60.0
_MOST_KNOWN = 256
_OF_CALLERS = "/apis/authentication.k8s.io/v1/tokenreviews"
_OF_ACCESS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
_MOST_CONNECTIONS = 256
_CONNECTION_ENDS_AFTER_S = 10.0
_METRICS_FRESH_FOR_S = 1.0


class ControllerHealthServer:
    """Serve HTTP on all addresses of the pod; port 0 takes a free one, ``access`` None lets all read ``/metrics``."""

    def __init__(
        self, port: int, alive: Check, ready: Check, registry: CollectorRegistry, access: TokenCheck | None = None
    ) -> None:
        self._access = access
        self._reviewers = ThreadPoolExecutor(_REVIEWS_AT_ONCE, "metrics-access")
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
        self._reviewers.shutdown(wait=False, cancel_futures=True)

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

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        refusal = await self._refusal(request)
        if refusal is not None:
            return refusal
        if time.monotonic() - self._metrics_at >= _METRICS_FRESH_FOR_S:
            self._metrics = generate_latest(self._registry)
            self._metrics_at = time.monotonic()
        return web.Response(body=self._metrics, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _refusal(self, request: web.Request) -> web.Response | None:
        """Return the response to a caller that may not read the series; None if it may."""
        if self._access is None:
            return None
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or not token:
            return web.Response(status=401, text="a bearer token is required\n", headers={"WWW-Authenticate": "Bearer"})
        try:
            allowed = await asyncio.wrap_future(self._reviewers.submit(self._access, token))
        except KubeError as error:
            logger.warning("metrics token not reviewed", error=str(error))
            return web.Response(status=503, text="the API server did not review the token\n")
        return None if allowed else web.Response(status=403, text="the token's owner may not get /metrics\n")


def _check_response(problem: str) -> web.Response:
    return web.Response(text=f"{problem or 'ok'}\n", status=503 if problem else 200)


class MetricsAccess:
    """Decide on tokens with a TokenReview, then a SubjectAccessReview; keep each decision for a minute. Thread-safe."""

    def __init__(self, review: Review, clock: Callable[[], float] = time.monotonic) -> None:
        self._review = review
        self._clock = clock
        self._known: Latest[bytes, tuple[float, bool]] = Latest(_MOST_KNOWN)

    def allows(self, token: str) -> bool:
        """Return True if a token's owner may read ``/metrics``; raise ``KubeError`` without an answer."""
        key, now = hashlib.sha256(token.encode()).digest(), self._clock()
        at, allowed = self._known.get(key) or (float("-inf"), False)
        if now - at >= _KNOWN_FOR_S:
            allowed = self._ask(token)
            self._known.put(key, (now, allowed))
        return allowed

    def _ask(self, token: str) -> bool:
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}}
        caller = self._review(_OF_CALLERS, review).get("status") or {}
        if not caller.get("authenticated"):
            return False
        user = caller.get("user") or {}
        spec = {"user": user.get("username", ""), "groups": user.get("groups") or [], "uid": user.get("uid", "")}
        spec["nonResourceAttributes"] = {"path": "/metrics", "verb": "get"}
        access = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
        return bool((self._review(_OF_ACCESS, access).get("status") or {}).get("allowed"))
