"""Collect an announced version from every rank of the trainer in one file: connect → receive → check.

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

from plaudit_wire.messages import PolicyVersion, Transfer, TransferPart
from plaudit_workers.weight_transfer.blocks import receive_blocks
from plaudit_workers.weight_transfer.exchange import (
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


class PartCollector:
    """Collects the parts of one version. ``collect`` blocks; ``cancel`` ends it, from any thread.

    Args:
        version: announced.
        transfer: its addresses and digests.
        stalled_after_s: give up when no byte arrives for so long.
    """

    def __init__(self, version: PolicyVersion, transfer: Transfer, stalled_after_s: float = STALLED_AFTER_S) -> None:
        self._version = version
        self._transfer = transfer
        self._stalled_after_s = stalled_after_s
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._cancelled = False

    def collect(self, file: int) -> bytes:
        """Write all parts to the file; return the probe, empty if there is none.

        Args:
            file: descriptor of a file for writing; no thread uses it any more when this returns or raises.

        Raises:
            TransferError: a rank is gone, stalled, or sent other bytes than those announced.
            OSError: the file cannot be written.
        """
        with ThreadPoolExecutor(_PARTS_AT_ONCE, "weights-receive") as threads:
            try:
                contents = list(threads.map(lambda part: self._receive_part(part, file), self._transfer.parts))
            except BaseException:
                self.cancel()  # the other parts are of no use
                raise
        if not covers_once((block for each in contents for block in each.blocks), self._transfer.num_bytes):
            raise TransferError("the parts of the ranks leave out bytes of the weights, or overlap")
        return b"".join(each.probe for each in contents)

    def cancel(self) -> None:
        """Break the connections of a ``collect`` in progress, which then raises."""
        with self._lock:
            self._cancelled = True
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads from it

    def _receive_part(self, part: TransferPart, file: int) -> Contents:
        try:
            with self._connected(part.address) as connection:
                contents = self._request(connection, part)
                connection.settimeout(self._stalled_after_s)
                receive_blocks(connection, contents.blocks, file)
                return contents
        except TransferError as error:
            raise TransferError(f"weights {self._version} from {part.address}: {error}") from error

    def _request(self, connection: socket.socket, part: TransferPart) -> Contents:
        try:
            nonce = receive_bytes(connection, NONCE_BYTES)
            send_frame(connection, make_request(self._transfer.token, nonce, self._version))
            encoded = receive_frame(connection, MAX_CONTENTS_BYTES)
            if hashlib.sha256(encoded).hexdigest() != part.digest:
                raise TransferError("the table of its blocks is not the announced one")
            return decode_contents(encoded, self._transfer.num_bytes)
        except (OSError, ValueError) as error:
            raise TransferError(str(error) or repr(error)) from error

    @contextmanager
    def _connected(self, address: str) -> Iterator[socket.socket]:
        host, _, port = address.rpartition(":")
        try:
            connection = socket.create_connection((host, int(port)), timeout=HANDSHAKE_WITHIN_S)
        except (OSError, ValueError) as error:
            raise TransferError(str(error) or repr(error)) from error
        with connection:
            with self._lock:
                if self._cancelled:
                    raise TransferError("cancelled")
                self._connections.add(connection)
            try:
                yield connection
            finally:
                with self._lock:
                    self._connections.discard(connection)
