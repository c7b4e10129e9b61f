"""Serve HTTP in an event loop that belongs to another program: the socket, and a uvicorn that leaves signals alone.

Metrics service, gateway, endpoint of agents, and reward models serve by it; it loads nothing of the metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

_BACKLOG = 2048


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


class HttpServer(uvicorn.Server):
    """Run uvicorn without signal handlers; the caller ends it with ``should_exit``."""

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
