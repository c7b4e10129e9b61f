"""Serve HTTP in an event loop that belongs to another program: the socket, and a uvicorn that leaves signals alone.

Metrics service, gateway, endpoint of agents, and reward models serve by it; it loads nothing of the metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

KEEP_ALIVE_S = 75
"""An idle connection is closed after this time, and never before: a call that is on its way to a connection that closes
is lost."""
_BACKLOG = 2048
_MOST_HEAD_BYTES = 64 << 10
"""Of a request's line and headers, and of its trailers; one packet more passes."""
_HEAD_WITHIN_S = 10.0
"""A request's line and headers, from the connection or from their first byte on."""


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address; port 0 is any free one.

    A response leaves in two packets, headers and body. asyncio switches Nagle's algorithm off only for sockets that
    were made with the number of the protocol, and ``create_server`` makes them without: the second packet would wait
    40 ms for the client's delayed acknowledgement. Accepted connections inherit the option. Raises ``OSError`` if the
    port is taken or the address is not this machine's.
    """
    listener = socket.create_server((host, port), backlog=_BACKLOG)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class _TimelyRequests(asyncio.Protocol):
    """Stand before uvicorn's protocol of a connection, and close one whose headers do not come in time.

    Uvicorn itself waits for their end without a limit.
    """

    transport: Any
    loop: Any
    cycle: Any
    """The newest request; None before the first."""
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_has_come()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._head_has_come()
        elif self._late is None:
            self._await_head()

    def _await_head(self) -> None:
        self._late = self.loop.call_later(_HEAD_WITHIN_S, self.transport.close)

    def _head_has_come(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class _BoundedRequests(asyncio.Protocol):
    """Stand before uvicorn's protocol of a connection, and keep two kinds of requests from it.

    One asks for another protocol; it is read as if it did not (RFC 9110, 7.8). Java's client asks for HTTP/2. httptools
    takes what follows such a request's headers for the other protocol, and the body would be lost. Uvicorn hands such
    a request over, and its headers are read again without the wish.

    The other has headers without an end, which uvicorn would all keep.
    """

    parser: Any
    transport: Any
    scope: Any
    url: bytes
    _again: tuple[bytes, int]
    """The headers to read again, if any, and the place of what follows them."""
    _head_bytes = 0
    """Received since the last end of headers, part of a body, or end of a request."""

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        self._feed(data)
        if self._head_bytes > _MOST_HEAD_BYTES:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        super().on_headers_complete()  # type: ignore[misc]

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)  # type: ignore[misc]

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        super().on_message_complete()  # type: ignore[misc]

    def _feed(self, data: bytes) -> None:
        rest: Any = data
        while True:  # a client may send many in one packet
            self._again = b"", 0
            super().data_received(rest)
            headers, end = self._again
            if not headers:
                return
            rest = memoryview(rest)[end:]
            super().data_received(headers)
            if not rest or self.transport.is_closing():
                return

    def _should_upgrade(self) -> bool:
        """Let uvicorn begin no request whose headers are read again."""
        return bool(self.parser.get_method() != b"CONNECT")

    def handle_websocket_upgrade(self) -> None:
        """Keep the headers; uvicorn calls it while it handles the parser's exception, which names their end."""
        upgrade = sys.exception()
        assert upgrade is not None
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % (name, value) for name, value in self.scope["headers"] if name != b"upgrade"]
        self._again = b"\r\n".join([*lines, b"", b""]), upgrade.args[0]


class HttpServer(uvicorn.Server):
    """Run uvicorn without signal handlers; the caller ends it with ``should_exit``.

    Raises ``OSError`` if a file of ``options`` cannot be used.

    Args:
        end_within_s: After it, requests in flight at the end are cut off.
        protocols: Classes that stand before uvicorn's protocol of a connection.
        options: More of uvicorn's.
    """

    def __init__(
        self,
        application: ASGIApp,
        *,
        end_within_s: int,
        keep_alive_s: int = KEEP_ALIVE_S,
        protocols: tuple[type[asyncio.Protocol], ...] = (),
        **options: Any,
    ) -> None:
        config = uvicorn.Config(
            application,
            lifespan="off",
            log_config=None,
            access_log=False,
            ws="none",
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=end_within_s,
            **options,
        )
        config.load()
        own: Any = config.http_protocol_class
        # httptools; h11, where that is absent, knows of refused upgrades
        bounded = (_BoundedRequests,) if hasattr(own, "on_headers_complete") else ()
        config.http_protocol_class = type("HttpProtocol", (_TimelyRequests, *bounded, *protocols, own), {})
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down as uvicorn does, then close all connections: one whose client reads nothing would stay open."""
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await asyncio.sleep(0)  # a transport is closed in the loop's next round
