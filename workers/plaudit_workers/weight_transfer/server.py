"""Offer the newest version's part of this rank to rollouts. Runs in threads of each process of the trainer.

A new version replaces the one before. Transfers of the replaced one continue until the next is prepared: ``make_room``
breaks those that are left, so a rank holds at most two copies of its part. A rollout that stalls is disconnected, and
never delays the trainer.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import msgspec

from plaudit_wire.logs import get_logger
from plaudit_wire.messages import PolicyVersion
from plaudit_workers.weight_transfer.exchange import (
    GO,
    GO_WITHIN_S,
    HANDSHAKE_WITHIN_S,
    MAX_REQUEST_BYTES,
    NONCE_BYTES,
    STALLED_AFTER_S,
    TransferError,
    WeightsRequest,
    is_authentic,
    receive_bytes,
    receive_frame,
    send_frame,
)
from plaudit_workers.weight_transfer.part import WeightPart

logger = get_logger(__name__)

_MAX_CONNECTIONS = 512


class WeightServer:
    """Serve one part at a time on a TCP port. Threads are daemons: they never keep the process alive.

    Args:
        port: to listen on; 0: any free one.
    """

    def __init__(self, port: int = 0) -> None:
        self._listener = _listen(port)
        self._places = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._offer: tuple[PolicyVersion, str, WeightPart] | None = None
        self._lock = threading.Lock()
        self._sending: dict[socket.socket, WeightPart] = {}
        threading.Thread(target=self._accept, name="weights", daemon=True).start()

    @property
    def port(self) -> int:
        """Return the port that it listens on."""
        return int(self._listener.getsockname()[1])

    def make_room(self) -> None:
        """Break the transfers of replaced versions; to be called before the memory for another version is taken."""
        with self._lock:
            for connection, part in self._sending.items():
                if self._offer is None or part is not self._offer[2]:
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that sends

    def offer(self, version: PolicyVersion, token: str, part: WeightPart) -> None:
        """Replace the offered version.

        Args:
            version: the only one that is served from now on.
        """
        with self._lock:
            self._offer = (version, token, part)

    def close(self) -> None:
        """Stop listening and free the part; transfers in progress continue while the process lives."""
        self._offer = None
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            if not self._places.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="weights-send", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                self._send(connection)
        except (OSError, TransferError, msgspec.MsgspecError) as error:
            logger.warning("weights not sent", error=str(error))
        finally:
            self._places.release()

    def _send(self, connection: socket.socket) -> None:
        connection.settimeout(HANDSHAKE_WITHIN_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(nonce)
        request = msgspec.msgpack.decode(receive_frame(connection, MAX_REQUEST_BYTES), type=WeightsRequest)
        with self._registered(connection, request, nonce) as part:
            send_frame(connection, part.contents)
            connection.settimeout(GO_WITHIN_S)
            if receive_bytes(connection, len(GO)) != GO:
                raise TransferError("a rollout sent something else than the request for the blocks")
            connection.settimeout(STALLED_AFTER_S)  # of each block: ``sendall`` counts its whole duration
            for block in part.blocks:
                connection.sendall(block)

    @contextmanager
    def _registered(self, connection: socket.socket, request: WeightsRequest, nonce: bytes) -> Iterator[WeightPart]:
        """Yield the part that the rollout requests; ``make_room`` can break the connection meanwhile."""
        with self._lock:
            if self._offer is None or request.version != self._offer[0]:
                raise TransferError(f"a rollout requested version {request.version}, which is not offered")
            _, token, part = self._offer
            if not is_authentic(request, token, nonce):
                raise TransferError("a client does not know the token of the announcement")
            self._sending[connection] = part
        try:
            yield part
        finally:
            with self._lock:
                del self._sending[connection]


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 may be disabled in the kernel
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def host_towards(url: str) -> str:
    """Return the address of this machine from which it reaches the host of ``url``: peers of that host reach it there.

    Args:
        url: of Redis. A socket in the file system gives the loopback address.
    """
    host = urlsplit(url).hostname
    if not host:
        return "127.0.0.1"
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # of a datagram socket: chooses the route and sends nothing
        return str(probe.getsockname()[0])
