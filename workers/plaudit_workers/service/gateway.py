"""Run the gateway process: HTTP on one side, the run's Redis on the other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plaudit_job.load import load_job
from plaudit_job.secrets import secret_value
from plaudit_job.spec.rewards import CanarySpec
from plaudit_job.spec.rljob import RLJob
from plaudit_metrics.service.http_server import KEEP_ALIVE_S, HttpServer, listening_socket
from plaudit_reward.http import allow_connections
from plaudit_wire.errors import ConfigurationError, RefusedError
from plaudit_wire.logs import collect_seldom, get_logger
from plaudit_workers.job_start import service_of
from plaudit_workers.process import EXIT_DONE, HealthServer, ProcessSettings, Supervised
from plaudit_workers.service.application import (
    RECOGNISED,
    Application,
    GatewaySeries,
    ServiceDescription,
)
from plaudit_workers.service.callers import Callers
from plaudit_workers.service.canary import Canary, CanarySeries
from plaudit_workers.service.requests import LONGEST_WAIT_S, MOST_BYTES, MOST_PARTS, MOST_SAMPLES
from plaudit_workers.service.tokens import SampleRate, Tokens
from plaudit_workers.stream.transport import Transport
from plaudit_workers.timeline import stamp

logger = get_logger(__name__)
_END_WITHIN_S = 5
_END_BEHIND_SERVICE_WITHIN_S = 60
"""Calls in flight when a gateway ends: seconds until they are cut off, where others can serve the next ones."""
_MOST_CONNECTIONS = 8192
_MOST_STRANGERS = 1024
"""Connections that have not brought a token yet."""
_QUIET_S = 2.0
_LATEST_S = KEEP_ALIVE_S + 15
"""A gateway that leaves stays until no call has come for ``_QUIET_S`` and no connection is left, which a client ends or
has not used for ``KEEP_ALIVE_S``; and for ``_LATEST_S`` longer at most: on a busy node what sends calls here learns
late."""
_LOOK_S = 0.05


@dataclass(frozen=True)
class GatewaySettings:
    """Hold the environment of a gateway."""

    host: str
    """``PLAUDIT_GATEWAY_HOST``: the address it listens on; default 127.0.0.1."""
    port: int
    """``PLAUDIT_GATEWAY_PORT``."""
    tokens: Path
    """``PLAUDIT_GATEWAY_TOKENS``: folder with a file for each caller."""
    certificate: str = ""
    """``PLAUDIT_GATEWAY_TLS_CERT``: PEM file; empty: plain HTTP."""
    key: str = ""
    """``PLAUDIT_GATEWAY_TLS_KEY``: PEM file."""
    leaves_s: int = 0
    """``PLAUDIT_GATEWAY_LEAVES_S``: least seconds between SIGTERM and the end, until all that send calls here know it.
    Calls are answered, and their connections closed. Default 0: nothing else could serve them."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> GatewaySettings:
        """Read the settings. Raise ``RefusedError`` if one is missing or no port."""
        port, tokens = environment.get("PLAUDIT_GATEWAY_PORT", ""), environment.get("PLAUDIT_GATEWAY_TOKENS", "")
        leaves_s = environment.get("PLAUDIT_GATEWAY_LEAVES_S", "0")
        if not port.isdigit() or not tokens:
            raise RefusedError(
                f"PLAUDIT_GATEWAY_PORT is {port!r}, PLAUDIT_GATEWAY_TOKENS {tokens!r}: give a port and a folder with a "
                "file for each caller. 'plaudit run' sets them for a job without rollout and trainer"
            )
        if not leaves_s.isdecimal():
            raise RefusedError(f"PLAUDIT_GATEWAY_LEAVES_S is {leaves_s!r}: give whole seconds, 0 or more")
        return cls(
            environment.get("PLAUDIT_GATEWAY_HOST", "127.0.0.1"),
            int(port),
            Path(tokens),
            environment.get("PLAUDIT_GATEWAY_TLS_CERT", ""),
            environment.get("PLAUDIT_GATEWAY_TLS_KEY", ""),
            int(leaves_s),
        )


async def serve(settings: ProcessSettings, stop: asyncio.Event) -> int:
    """Run a gateway until ``stop`` is set."""
    own = GatewaySettings.from_environment()
    job = load_job(settings.job_path)
    tokens = Tokens(own.tokens)
    with contextlib.suppress(ConfigurationError):  # with fewer the connections that nobody knows end sooner
        allow_connections(_MOST_CONNECTIONS)
    listener = listen(own)
    transport = Transport(settings.redis, settings.run)
    callers = Callers(transport, service_of(job))
    gateway = application(job, settings.run, callers, tokens)
    # Prometheus reads the series here: on the gateway's own port they need a caller's token.
    pages = {"/metrics": gateway.metrics}
    try:
        async with HealthServer(settings.health_port, ready=callers.is_running.is_set, pages=pages):
            stamp("ready")
            collect_seldom()
            await serve_on(gateway, callers, listener, own, stop)
            await gateway.close()
    finally:
        listener.close()
        await transport.close()
    return EXIT_DONE


def application(job: RLJob, run: str, callers: Callers, tokens: Tokens) -> Application:
    """Return the application of a job's service."""
    limits = {
        "samples": MOST_SAMPLES,
        "body_bytes": MOST_BYTES,
        "body_values": MOST_PARTS,
        "wait_s": LONGEST_WAIT_S,
    }
    series, spec = GatewaySeries(), job.spec.reward.gateway
    rate = SampleRate(spec.samples_per_minute and spec.samples_per_minute / max(1, spec.replicas))
    compared = CanarySeries(series.registry) if spec.canary else None
    description = ServiceDescription(job, run, limits, compared)
    canary = _canary(spec.canary, compared) if spec.canary and compared else None
    return Application(callers, tokens, description, series, rate, canary)


def _canary(spec: CanarySpec, compared: CanarySeries) -> Canary:
    field = "reward.gateway.canary.service"
    if not spec.service.url or spec.service.token_secret is None:
        raise RefusedError(f"{field}: give url and tokenSecret; a name is known on Kubernetes only")
    token = partial(secret_value, spec.service.token_secret, f"{field}.tokenSecret")
    return Canary(spec.service.url, token, spec.share, compared)


async def serve_on(
    gateway: Application, callers: Callers, listener: socket.socket, own: GatewaySettings, stop: asyncio.Event
) -> None:
    """Serve HTTP until ``stop`` is set and the gateway has left. Raises what ends the sessions."""
    leaving = Leaving(gateway.asgi())
    server = _server(leaving, own)
    address, port = listener.getsockname()[:2]
    logger.info("serving", address=f"{'https' if own.certificate else 'http'}://{address}:{port}")
    async with Supervised() as tasks:
        tasks.start(callers.run())
        await callers.is_running.wait()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await stop.wait()
        leaving.begun = True
        if own.leaves_s:
            await leaving.end(own.leaves_s, lambda: bool(server.server_state.connections) or _is_asked(listener))
            for accepting in server.servers:  # at once: uvicorn looks at should_exit every 0.1 s
                accepting.close()
        server.should_exit = True
        await serving


def _server(asgi: ASGIApp, own: GatewaySettings) -> HttpServer:
    """Return the server. Raise ``RefusedError`` if its certificate cannot be used."""
    try:
        return HttpServer(
            asgi,
            end_within_s=_END_BEHIND_SERVICE_WITHIN_S if own.leaves_s else _END_WITHIN_S,
            protocols=(type("Bounded", (_Bounded,), {"strangers": Strangers()}),),
            limit_concurrency=_MOST_CONNECTIONS,
            ssl_certfile=own.certificate or None,
            ssl_keyfile=own.key or None,
        )
    except OSError as error:
        raise RefusedError(f"PLAUDIT_GATEWAY_TLS_CERT {own.certificate}: {error}") from error


def _is_asked(listener: socket.socket) -> bool:
    """Return True if a connection has arrived that was not accepted yet."""
    arrived = select.poll()
    arrived.register(listener.fileno(), select.POLLIN)
    return bool(arrived.poll(0))


class Leaving:
    """Answer as an application does; once the gateway leaves, each answer says that it ends its connection.

    The next call then goes to another gateway. It has to be said in the headers: uvicorn's h11 protocol (of an
    environment without httptools) closes a connection whose ``keep_alive`` was taken away and does not say so, and the
    client's next call meets the end.
    """

    def __init__(self, application: ASGIApp) -> None:
        self._application = application
        self.begun = False
        self.called_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def said(message: Message) -> None:
            if self.begun and message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        self.called_at = asyncio.get_running_loop().time()
        await self._application(scope, receive, said)

    async def end(self, least_s: float, is_in_use: Callable[[], bool]) -> None:
        """Wait for ``least_s``, and until no call has come for a while and ``is_in_use`` says that none can come."""
        clock = asyncio.get_running_loop().time
        first = clock() + least_s
        while (now := clock()) < first + _LATEST_S:
            if now >= max(first, self.called_at + _QUIET_S) and not is_in_use():
                return
            await asyncio.sleep(_LOOK_S)


class Strangers:
    """Hold the connections that have not brought a token yet: one too many ends another, so that nobody is locked out.

    The oldest ends of the address that has the most.
    """

    def __init__(self, most: int = _MOST_STRANGERS) -> None:
        self._most = most
        self._number = 0
        self._by_address: dict[str, dict[Any, None]] = {}

    def add(self, connection: Any) -> None:
        """Add a new connection."""
        self._by_address.setdefault(_address(connection), {})[connection] = None
        self._number += 1
        if self._number > self._most:
            most = max(self._by_address, key=lambda address: len(self._by_address[address]))
            oldest = next(iter(self._by_address[most]))
            self.remove(oldest)
            oldest.transport.abort()

    def remove(self, connection: Any) -> None:
        """Remove a connection that has brought a token or has ended."""
        address = _address(connection)
        of_address = self._by_address.get(address, {})
        if connection in of_address:
            del of_address[connection]
            self._number -= 1
        if not of_address:
            self._by_address.pop(address, None)


def _address(connection: Any) -> str:
    return str(connection.client[0]) if connection.client else ""


class _Bounded(asyncio.Protocol):
    """Bound how many connections have not brought a token yet.

    At the end a connection that has brought no call yet stays open for the moment: its first one is on the way.

    It stands before uvicorn's protocol of a connection, whose attributes it reads.
    """

    strangers: Strangers
    cycle: Any
    """The newest request; None before the first."""

    def __init__(self, config: Any, server_state: Any, app_state: dict[str, Any], _loop: Any = None) -> None:
        state = {**app_state, RECOGNISED: lambda: self.strangers.remove(self)}
        super().__init__(config, server_state, state, _loop)  # type: ignore[call-arg]

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.strangers.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.strangers.remove(self)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close an idle connection, and any other after its response, but not a new one."""
        if self.cycle is not None:
            super().shutdown()  # type: ignore[misc]


def listen(own: GatewaySettings) -> socket.socket:
    """Listen on the gateway's address. Raise ``RefusedError`` if it is taken."""
    try:
        return listening_socket(own.host, own.port)
    except OSError as error:
        raise RefusedError(f"cannot listen on {own.host}:{own.port}: {error}. Give another port") from error
