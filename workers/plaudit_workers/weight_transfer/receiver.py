"""Receive an announced version into memory: connect to every rank of the trainer → receive → check → folder.

The bytes go into an anonymous file in memory, which looks like the trainer's safetensors file to the engine. They
count as memory of the process until the engine has copied them.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from plaudit_wire.messages import PolicyVersion, Transfer, TransferPart
from plaudit_workers.published_weights import PROBE_FILE, WEIGHTS_FILE
from plaudit_workers.weight_transfer.available_memory import available_bytes
from plaudit_workers.weight_transfer.exchange import (
    HANDSHAKE_WITHIN_S,
    NONCE_BYTES,
    STALLED_AFTER_S,
    TransferError,
    make_request,
    receive_bytes,
    receive_frame,
    receive_into,
    send_frame,
)
from plaudit_workers.weight_transfer.part import MAX_CONTENTS_BYTES, Contents, WeightBlock, covers_once, decode_contents

_PARTS_AT_ONCE = 8


class Reception:
    """The weights of one version in memory. ``receive`` blocks; ``close`` frees the memory, from any thread.

    Args:
        version: announced.
        transfer: its addresses and digests.
        stalled_after_s: give up when no byte arrives for so long.
    """

    def __init__(self, version: PolicyVersion, transfer: Transfer, stalled_after_s: float = STALLED_AFTER_S) -> None:
        self._stalled_after_s = stalled_after_s
        self._version = version
        self._transfer = transfer
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._closed = False
        self._folder = Path(tempfile.mkdtemp(prefix="plaudit-weights-"))
        self._file = os.memfd_create(f"weights-{version}")

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Free the memory."""
        self.close()

    def receive(self) -> Path:
        """Receive all parts; return a folder with the weights (a link into memory) and the probe.

        Raises:
            TransferError: a rank is gone, stalled, or sent other bytes than those announced; or there is no memory.
        """
        num_bytes = self._transfer.num_bytes
        if num_bytes > (available := available_bytes()):
            raise TransferError(f"the weights have {num_bytes:,} bytes, {available:,} bytes of memory are available")
        try:
            os.ftruncate(self._file, num_bytes)
            target = memoryview(mmap.mmap(self._file, num_bytes))
        except (OSError, ValueError) as error:
            raise TransferError(f"no memory for {num_bytes:,} bytes of weights: {error}") from error
        with ThreadPoolExecutor(_PARTS_AT_ONCE, "weights-receive") as threads:
            tables = [threads.submit(self._receive_part, part, target) for part in self._transfer.parts]
        contents = [table.result() for table in tables]
        if not covers_once((block for each in contents for block in each.blocks), num_bytes):
            raise TransferError("the parts of the ranks leave out bytes of the weights, or overlap")
        (self._folder / WEIGHTS_FILE).symlink_to(f"/proc/{os.getpid()}/fd/{self._file}")
        for probe in (each.probe for each in contents if each.probe):
            (self._folder / PROBE_FILE).write_bytes(probe)
        return self._folder

    def close(self) -> None:
        """Break the connections of a ``receive`` in progress, which then raises, and free the memory."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads from it
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._file)

    def _receive_part(self, part: TransferPart, target: memoryview) -> Contents:
        try:
            with self._connected(part.address) as connection:
                contents = self._receive_contents(connection, part)
                connection.settimeout(self._stalled_after_s)
                with ThreadPoolExecutor(1, "weights-check") as checks:  # hashes a block while the next one arrives
                    checked: list[Future[None]] = []
                    for block in contents.blocks:
                        view = target[block.offset : block.offset + block.length]
                        receive_into(connection, view)
                        checked.append(checks.submit(_check, block, view))
                for each in checked:
                    each.result()
                return contents
        except (OSError, ValueError) as error:
            raise TransferError(f"weights {self._version} from {part.address}: {error or repr(error)}") from error
        except TransferError as error:
            raise TransferError(f"weights {self._version} from {part.address}: {error}") from error

    def _receive_contents(self, connection: socket.socket, part: TransferPart) -> Contents:
        nonce = receive_bytes(connection, NONCE_BYTES)
        send_frame(connection, make_request(self._transfer.token, nonce, self._version))
        encoded = receive_frame(connection, MAX_CONTENTS_BYTES)
        if hashlib.sha256(encoded).hexdigest() != part.digest:
            raise TransferError("the table of its blocks is not the announced one")
        return decode_contents(encoded, self._transfer.num_bytes)

    @contextmanager
    def _connected(self, address: str) -> Iterator[socket.socket]:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=HANDSHAKE_WITHIN_S) as connection:
            with self._lock:
                if self._closed:
                    raise TransferError("cancelled")
                self._connections.add(connection)
            try:
                yield connection
            finally:
                with self._lock:
                    self._connections.discard(connection)


def _check(block: WeightBlock, view: memoryview) -> None:
    if hashlib.sha256(view).digest() != block.digest:
        raise TransferError(f"the block at byte {block.offset} does not have the announced digest")
