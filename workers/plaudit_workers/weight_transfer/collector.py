"""Collect an announced version from every rank of the trainer in one file: connect → table → blocks.

Used by rollouts, for a file in memory (``receiver``), and by rank 0 of the trainer, for one on the run's volume.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

from plaudit_wire.messages import PolicyVersion, Transfer, TransferPart
from plaudit_workers.weight_transfer.blocks import receive_blocks
from plaudit_workers.weight_transfer.exchange import (
    GO,
    HANDSHAKE_WITHIN_S,
    NONCE_BYTES,
    STALLED_AFTER_S,
    TransferError,
    make_request,
    receive_bytes,
    receive_frame,
    send_frame,
)
from plaudit_workers.weight_transfer.part import MAX_CONTENTS_BYTES, Contents, covers_once, decode_contents

_PARTS_AT_ONCE = 8


class _OpenPart(NamedTuple):
    """Hold a rank that has sent its table and waits for the request of the blocks."""

    address: str
    connection: socket.socket
    contents: Contents


class PartCollector:
    """Collect the parts of one version. ``collect`` blocks; ``cancel`` ends it, from any thread.

    Args:
        stalled_after_s: how long no byte may arrive.
    """

    def __init__(self, version: PolicyVersion, transfer: Transfer, stalled_after_s: float = STALLED_AFTER_S) -> None:
        self._version = version
        self._transfer = transfer
        self._stalled_after_s = stalled_after_s
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self._cancelled = False

    def collect(self, file: int) -> bytes:
        """Write all parts to the file; return the probe, empty if there is none. Called once.

        All ranks are asked first: from then on they keep the version for this process.

        Args:
            file: descriptor for writing; no thread uses it any more when this returns or raises.

        Raises:
            TransferError: a rank is gone, stalled, or sent other bytes than those announced.
            OSError: the file cannot be written.
        """
        try:
            with ThreadPoolExecutor(_PARTS_AT_ONCE, "weights-receive") as threads:
                try:
                    parts = list(threads.map(self._open, self._transfer.parts))
                    blocks = (block for part in parts for block in part.contents.blocks)
                    if not covers_once(blocks, self._transfer.num_bytes):
                        raise TransferError("the parts of the ranks leave out bytes of the weights, or overlap")
                    list(threads.map(lambda part: self._receive(part, file), parts))
                except BaseException:
                    self.cancel()  # the other parts are of no use
                    raise
        finally:
            for connection in self._connections:
                connection.close()
        return b"".join(part.contents.probe for part in parts)

    def cancel(self) -> None:
        """Break the connections of a ``collect`` in progress, which then raises."""
        with self._lock:
            self._cancelled = True
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads from it

    def _open(self, part: TransferPart) -> _OpenPart:
        with self._errors_of(part.address):
            connection = self._connect(part.address)
            return _OpenPart(part.address, connection, self._request(connection, part.digest))

    def _connect(self, address: str) -> socket.socket:
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout=HANDSHAKE_WITHIN_S)
        with self._lock:
            self._connections.append(connection)
            if self._cancelled:
                raise TransferError("cancelled")
        return connection

    def _request(self, connection: socket.socket, digest: str) -> Contents:
        nonce = receive_bytes(connection, NONCE_BYTES)
        send_frame(connection, make_request(self._transfer.token, nonce, self._version))
        encoded = receive_frame(connection, MAX_CONTENTS_BYTES)
        if hashlib.sha256(encoded).hexdigest() != digest:
            raise TransferError("the table of its blocks is not the announced one")
        return decode_contents(encoded, self._transfer.num_bytes)

    def _receive(self, part: _OpenPart, file: int) -> None:
        with self._errors_of(part.address):
            part.connection.sendall(GO)
        try:
            part.connection.settimeout(self._stalled_after_s)
            receive_blocks(part.connection, part.contents.blocks, file)
        except TransferError as error:
            raise self._named(part.address, error) from error

    @contextmanager
    def _errors_of(self, address: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, TransferError) as error:
            raise self._named(address, error) from error

    def _named(self, address: str, error: Exception) -> TransferError:
        return TransferError(f"weights {self._version} from {address}: {str(error) or repr(error)}")
