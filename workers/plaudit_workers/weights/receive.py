"""Receive an announced version: connect to every rank of the trainer → tables of their parts → blocks.

``PartCollector`` writes the parts into any file; rank 0 of the trainer uses it for one on the run's volume.
``Reception`` is the rollout's: it checks the memory and receives into an anonymous file in memory. ``send`` describes
the protocol.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

from plaudit_wire.messages import PolicyVersion, Transfer, TransferPart
from plaudit_workers.weights.published import PROBE_FILE, WEIGHTS_FILE
from plaudit_workers.weights.send import (
    GO,
    HANDSHAKE_WITHIN_S,
    MAX_CONTENTS_BYTES,
    NONCE_BYTES,
    STALLED_AFTER_S,
    Contents,
    TransferError,
    WeightBlock,
    break_off,
    covers_once,
    decode_contents,
    make_request,
    receive_bytes,
    receive_frame,
    receive_into,
    send_frame,
)

_CGROUPS = Path("sys/fs/cgroup")
CHUNK_BYTES = 1 << 20
"""Size of a buffer."""
_PARTS_AT_ONCE = 8


class Reception:
    """Hold the weights of one version in memory. ``receive`` blocks; ``close`` frees the memory, from any thread.

    The anonymous file looks like the trainer's safetensors file to the engine. Its bytes count as memory of the process
    until the engine has copied them.
    """

    def __init__(self, version: PolicyVersion, transfer: Transfer, stalled_after_s: float = STALLED_AFTER_S) -> None:
        self._num_bytes = transfer.num_bytes
        self._collector = PartCollector(version, transfer, stalled_after_s)
        self._lock = threading.Lock()
        self._closed = False
        self._folder = Path(tempfile.mkdtemp(prefix="plaudit-weights-"))
        self._file = os.memfd_create(f"weights-{version}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
                break_off(connection)

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


class _OpenPart(NamedTuple):
    """Hold a rank that has sent its table and waits for the request of the blocks."""

    address: str
    connection: socket.socket
    contents: Contents


def receive_blocks(connection: socket.socket, blocks: Iterable[WeightBlock], file: int) -> None:
    """Receive blocks in this order, check each, and write it where it belongs.

    Each chunk is hashed and written while the next one arrives, in two small buffers. Nothing maps the file, so its
    memory or disk is freed when it is closed, whatever an exception still refers to.

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


class _Controller(NamedTuple):
    """Name the files of one version of cgroups. The cache of files is reclaimed before a process is killed."""

    limit: str
    usage: str
    cached: tuple[str, ...]


_V1 = _Controller("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_V2 = _Controller("memory.max", "memory.current", ("inactive_file", "active_file"))


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that this process can take without swapping and without reaching a limit of its cgroups.

    A process that exceeds such a limit is killed, however much the machine has left. An anonymous file counts towards
    the cgroup of the process that fills it.
    """
    lines = (root / "proc/meminfo").read_text().splitlines()
    machine = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    limits = (_left(folder, controller) for folder, controller in _cgroups(root))
    return min([machine, *(left for left in limits if left is not None)])


def _cgroups(root: Path) -> Iterator[tuple[Path, _Controller]]:
    """Yield the folders of the process's cgroups that may limit its memory: its own and those around it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, controller = (root / _CGROUPS / "memory", _V1) if controllers else (root / _CGROUPS, _V2)
        own = Path(path.lstrip("/"))
        # In containers the path may be that of the host, and the mount the container's own cgroup.
        for folder in (own, *own.parents):
            yield mount / folder, controller


def _left(folder: Path, controller: _Controller) -> int | None:
    """Return the bytes left of a cgroup's limit; None if it has none."""
    try:
        limit = int((folder / controller.limit).read_text())
        used = int((folder / controller.usage).read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None  # no such folder, or no limit ("max")
    return max(0, limit - used + sum(int(counts.get(name, 0)) for name in controller.cached))
