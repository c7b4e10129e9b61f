"""Receive an announced version into memory: check the memory → collect the parts → folder.

The bytes go into an anonymous file in memory, which looks like the trainer's safetensors file to the engine. They
count as memory of the process until the engine has copied them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from plaudit_wire.messages import PolicyVersion, Transfer
from plaudit_workers.published_weights import PROBE_FILE, WEIGHTS_FILE
from plaudit_workers.weight_transfer.available_memory import available_bytes
from plaudit_workers.weight_transfer.collector import PartCollector
from plaudit_workers.weight_transfer.exchange import STALLED_AFTER_S, TransferError


class Reception:
    """Hold the weights of one version in memory. ``receive`` blocks; ``close`` frees the memory, from any thread.

    Args:
        stalled_after_s: how long no byte may arrive.
    """

    def __init__(self, version: PolicyVersion, transfer: Transfer, stalled_after_s: float = STALLED_AFTER_S) -> None:
        self._num_bytes = transfer.num_bytes
        self._collector = PartCollector(version, transfer, stalled_after_s)
        self._lock = threading.Lock()
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
        if self._num_bytes > (available := available_bytes()):
            raise TransferError(
                f"the weights have {self._num_bytes:,} bytes, {available:,} bytes of memory are available"
            )
        try:
            with self._duplicate() as file:
                os.ftruncate(file, self._num_bytes)
                probe = self._collector.collect(file)
        except OSError as error:
            raise TransferError(f"no memory for {self._num_bytes:,} bytes of weights: {error}") from error
        (self._folder / WEIGHTS_FILE).symlink_to(f"/proc/{os.getpid()}/fd/{self._file}")
        if probe:
            (self._folder / PROBE_FILE).write_bytes(probe)
        return self._folder

    def close(self) -> None:
        """Break the connections of a ``receive`` in progress, which then raises, and free the memory."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._file)
        self._collector.cancel()
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextmanager
    def _duplicate(self) -> Iterator[int]:
        """Yield a descriptor that ``close`` does not close: its number could stand for another file at once."""
        with self._lock:
            if self._closed:
                raise TransferError("cancelled")
            file = os.dup(self._file)
        try:
            yield file
        finally:
            os.close(file)
