"""Receive the blocks of a part into a file: each chunk is hashed and written while the next one arrives.

Blocks pass through two small buffers. Nothing maps the file, so its memory or disk is freed when it is closed, whatever
an exception still refers to.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from plaudit_workers.weight_transfer.exchange import TransferError, receive_into
from plaudit_workers.weight_transfer.part import WeightBlock

CHUNK_BYTES = 1 << 20
"""Size of a buffer."""


def receive_blocks(connection: socket.socket, blocks: Iterable[WeightBlock], file: int) -> None:
    """Receive blocks in this order, check each, and write it where it belongs.

    Args:
        connection: with a timeout for each read.
        file: descriptor; may be written by several threads at once.

    Raises:
        TransferError: the connection broke or stalled, or a block is not the announced one.
        OSError: the file cannot be written.
    """
    buffers = itertools.cycle([memoryview(bytearray(CHUNK_BYTES)) for _ in range(2)])
    with ThreadPoolExecutor(1, "weights-check") as thread:
        storing: Future[None] | None = None
        for block in blocks:
            stored = _StoredBlock(block, file)
            for start in range(0, block.length, CHUNK_BYTES):
                chunk = next(buffers)[: block.length - start]
                _receive(connection, chunk)
                if storing is not None:
                    storing.result()
                storing = thread.submit(stored.append, chunk)
        if storing is not None:
            storing.result()


def _receive(connection: socket.socket, chunk: memoryview) -> None:
    try:
        receive_into(connection, chunk)
    except OSError as error:
        raise TransferError(str(error) or repr(error)) from error


class _StoredBlock:
    """Write a block chunk by chunk and check it at its end."""

    def __init__(self, block: WeightBlock, file: int) -> None:
        self._block = block
        self._file = file
        self._digest = hashlib.sha256()
        self._length = 0

    def append(self, chunk: memoryview) -> None:
        self._digest.update(chunk)
        while chunk:
            written = os.pwrite(self._file, chunk, self._block.offset + self._length)
            self._length, chunk = self._length + written, chunk[written:]
        if self._length == self._block.length and self._digest.digest() != self._block.digest:
            raise TransferError(f"the block at byte {self._block.offset} does not have the announced digest")
