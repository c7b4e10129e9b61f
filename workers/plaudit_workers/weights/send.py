"""Offer the newest version's part of this rank to rollouts, by a protocol of one connection each.

1. The trainer sends a nonce of 32 bytes.
2. The rollout sends a frame with the version that it wants and HMAC-SHA256 of nonce and version under the token. The
   token is in the announcement, so only processes that may read the run's state in Redis have it.
3. The trainer sends a frame with the table of its part (``Contents``). A wrong proof, or a version that it does not
   hold any more, closes the connection at once.
4. The rollout sends ``GO`` when it has the tables of all ranks and is ready for this one's blocks. The rank keeps the
   version for it until then, so one that is published meanwhile does not break the transfer.
5. The trainer sends the blocks and closes.

The rollout checks the table against the digest in the announcement and each block against the table. So neither side
trusts the network; the weights themselves are not encrypted. A frame is its length (4 bytes, big endian) and msgpack.
The parts of all ranks are the bytes of one safetensors file (``file_layout``), each cut into hashed blocks.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Self
from urllib.parse import urlsplit

import msgspec

from plaudit_wire.logs import get_logger
from plaudit_wire.messages import PolicyVersion

logger = get_logger(__name__)
NONCE_BYTES = 32
HANDSHAKE_WITHIN_S = 10.0
"""Time for a connection, and for each message before the first block."""
PROOF_WITHIN_S = 5.0
"""Time for a peer to show that it knows the token."""
GO = b"g"
GO_WITHIN_S = 3600.0
"""Time until a rollout asks for the blocks, during which it receives those of other ranks."""
STALLED_AFTER_S = 30.0
"""A connection is given up when a read, or the sending of one block, takes longer."""
MAX_REQUEST_BYTES = 1024
_MESSAGE_LENGTH_BYTES = 4
BLOCK_BYTES = 16 << 20
"""Largest block: the unit that is hashed, sent and checked."""
MAX_BLOCKS = 1 << 20
MAX_CONTENTS_BYTES = 128 << 20
"""Largest table of blocks in its encoded form: ``MAX_BLOCKS`` need less."""
_HASHING_THREADS = min(8, os.cpu_count() or 1)
_MAX_CONNECTIONS = 512
_MAX_UNPROVEN, _MAX_UNPROVEN_OF_ADDRESS = 256, 32
_LEAST_WAIT_S = 1e-3
_SHORT_PAUSE_S = 1.0
_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "U8": 1, "I8": 1, "BOOL": 1}
"""Name of a type in safetensors → bytes of an element."""
_ALIGNMENT = 8
_HEADER_LENGTH_BYTES = 8
TensorParts = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of tensors whose bytes follow each other."""


class TransferError(Exception):
    """Report that weights could not be received: the peer is gone, stalled, or sent other bytes than announced."""


class WeightServer:
    """Serve one part at a time on a TCP port (0: any free one), in threads that never keep the process alive.

    A new version replaces the one before. Transfers of the replaced one continue until the next is prepared:
    ``make_room`` breaks those that are left, so a rank holds at most two copies of its part. A rollout that stalls is
    disconnected, and never delays the trainer.

    A connection has a place among the transfers only when it has shown the token, within ``PROOF_WITHIN_S``. Before
    that few are kept, of each address and of all: a new one takes the place of the oldest.

    Args:
        host: the address of this machine at which rollouts reach it; it listens nowhere else.
    """

    def __init__(self, port: int = 0, host: str = "127.0.0.1") -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=_MAX_UNPROVEN)
        self._places = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._unproven: dict[socket.socket, str] = {}
        """Connections that have not shown the token, the oldest first → the peer's address."""
        self._offer: tuple[PolicyVersion, str, WeightPart] | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
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
                    break_off(connection)

    def offer(self, version: PolicyVersion, token: str, part: WeightPart) -> None:
        """Replace the offered version."""
        with self._lock:
            self._offer = (version, token, part)

    def close(self) -> None:
        """Stop listening and free the part; transfers in progress continue while the process lives."""
        self._offer = None
        self._closed.set()
        break_off(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, (address, *_) = self._listener.accept()
            except OSError as error:  # closed, or this process has no descriptor left
                if not self._closed.wait(_SHORT_PAUSE_S):
                    logger.warning("no connection for weights accepted", error=str(error))
                continue
            self._admit(connection, address)
            threading.Thread(target=self._serve, args=(connection,), name="weights-send", daemon=True).start()

    def _admit(self, connection: socket.socket, address: str) -> None:
        """Register a connection without proof; break the oldest one if its address, or all, have too many."""
        with self._lock:
            of_address = [each for each, other in self._unproven.items() if other == address]
            if len(of_address) >= _MAX_UNPROVEN_OF_ADDRESS:
                self._drop(of_address[0])
            elif len(self._unproven) >= _MAX_UNPROVEN:
                self._drop(next(iter(self._unproven)))
            self._unproven[connection] = address

    def _drop(self, connection: socket.socket) -> None:
        del self._unproven[connection]
        break_off(connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                self._send(connection)
        except (OSError, TransferError, msgspec.MsgspecError) as error:
            logger.warning("weights not sent", error=str(error))
        finally:
            with self._lock:
                self._unproven.pop(connection, None)

    def _send(self, connection: socket.socket) -> None:
        deadline_s = time.monotonic() + PROOF_WITHIN_S
        connection.settimeout(PROOF_WITHIN_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(nonce)
        encoded = receive_frame(connection, MAX_REQUEST_BYTES, deadline_s)
        request = msgspec.msgpack.decode(encoded, type=WeightsRequest)
        with self._registered(connection, request, nonce) as part:
            connection.settimeout(HANDSHAKE_WITHIN_S)
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
            version, token, part = self._offer
            if not hmac.compare_digest(request.proof, _proof(token, nonce, version)):
                raise TransferError("a client does not know the token of the announcement")
            if not self._places.acquire(blocking=False):
                raise TransferError(f"{_MAX_CONNECTIONS} rollouts receive weights already")
            self._unproven.pop(connection, None)
            self._sending[connection] = part
        try:
            yield part
        finally:
            with self._lock:
                del self._sending[connection]
            self._places.release()


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


class WeightsRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request a version. Written by the receiver, read by the server."""

    version: PolicyVersion
    proof: bytes


def make_request(token: str, nonce: bytes, version: PolicyVersion) -> bytes:
    """Return the encoded request of a version."""
    return msgspec.msgpack.encode(WeightsRequest(version, _proof(token, nonce, version)))


def _proof(token: str, nonce: bytes, version: PolicyVersion) -> bytes:
    return hmac.digest(token.encode(), nonce + str(version).encode(), hashlib.sha256)


def break_off(connection: socket.socket) -> None:
    """Shut a socket down, which wakes the thread that waits at it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def send_frame(connection: socket.socket, content: bytes) -> None:
    """Send one frame."""
    connection.sendall(len(content).to_bytes(_MESSAGE_LENGTH_BYTES, "big") + content)


def receive_frame(connection: socket.socket, max_bytes: int, deadline_s: float = math.inf) -> bytes:
    """Receive one frame.

    Args:
        deadline_s: monotonic time at which the whole frame must be there.

    Raises:
        TransferError: the peer closed the connection, or the frame is larger than ``max_bytes``.
        OSError: the connection broke or stalled.
    """
    length = int.from_bytes(receive_bytes(connection, _MESSAGE_LENGTH_BYTES, deadline_s), "big")
    if length > max_bytes:
        raise TransferError(f"the peer announced a frame of {length:,} bytes; at most {max_bytes:,} are allowed")
    return receive_bytes(connection, length, deadline_s)


def receive_bytes(connection: socket.socket, count: int, deadline_s: float = math.inf) -> bytes:
    """Receive exactly ``count`` bytes; raise like ``receive_frame``."""
    content = bytearray(count)
    receive_into(connection, memoryview(content), deadline_s)
    return bytes(content)


def receive_into(connection: socket.socket, target: memoryview, deadline_s: float = math.inf) -> None:
    """Fill ``target``; raise like ``receive_frame``."""
    while target:
        if deadline_s < math.inf:
            connection.settimeout(max(_LEAST_WAIT_S, deadline_s - time.monotonic()))
        received = connection.recv_into(target)
        if not received:
            raise TransferError("the peer closed the connection")
        target = target[received:]


class WeightBlock(msgspec.Struct, frozen=True, array_like=True):
    """Locate consecutive bytes of the weights file."""

    offset: int
    length: int
    digest: bytes
    """SHA-256."""


class Contents(msgspec.Struct, frozen=True, array_like=True):
    """Hold the table of a part. Written by a rank of the trainer, read before the blocks."""

    blocks: list[WeightBlock]
    probe: bytes = b""
    """``probe.json``; of rank 0 only."""


@dataclass(frozen=True)
class WeightPart:
    """Hold a part in memory: its encoded table, and the bytes of each block in the table's order."""

    contents: bytes
    blocks: list[memoryview]

    @property
    def digest(self) -> str:
        """Return SHA-256 of the table, which contains the digests of all blocks."""
        return hashlib.sha256(self.contents).hexdigest()

    @classmethod
    def of(cls, pieces: Iterable[tuple[int, memoryview]], probe: bytes = b"") -> Self:
        """Cut pieces into blocks, and hash each beside the making of the next.

        Args:
            pieces: (offset in the file, bytes); they must not change as long as the part is offered.
        """
        with ThreadPoolExecutor(_HASHING_THREADS) as threads:
            blocks = [
                (offset + start, block, threads.submit(hashlib.sha256, block))
                for offset, piece in pieces
                for start in range(0, len(piece), BLOCK_BYTES)
                for block in (piece[start : start + BLOCK_BYTES],)
            ]
        table = [WeightBlock(offset, len(block), hashed.result().digest()) for offset, block, hashed in blocks]
        return cls(msgspec.msgpack.encode(Contents(table, probe)), [block for _, block, _ in blocks])


def decode_contents(encoded: bytes, num_bytes: int) -> Contents:
    """Decode a part's table; raise ``ValueError`` if it is none, or a block does not lie within the file."""
    try:
        contents = msgspec.msgpack.decode(encoded, type=Contents)
    except msgspec.MsgspecError as error:
        raise ValueError(f"no table of blocks: {error}") from error
    if len(contents.blocks) > MAX_BLOCKS:
        raise ValueError(f"the table has {len(contents.blocks):,} blocks; at most {MAX_BLOCKS:,} are allowed")
    for block in contents.blocks:
        if not 0 < block.length <= BLOCK_BYTES or block.offset < 0 or block.offset + block.length > num_bytes:
            raise ValueError(f"block at {block.offset} of {block.length} bytes: not within a file of {num_bytes} bytes")
    return contents


def covers_once(blocks: Iterable[WeightBlock], num_bytes: int) -> bool:
    """Return True if the blocks contain every byte of the file exactly once."""
    end = 0
    for block in sorted(blocks, key=lambda block: block.offset):
        if block.offset != end:
            return False
        end += block.length
    return end == num_bytes


class TensorShape(NamedTuple):
    """Describe a whole tensor: its name, its type as safetensors names it (``BF16``), and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: TensorParts = ()
    """The tensors that a file has in its place, which consist of its bytes; empty: the tensor itself."""

    @property
    def num_bytes(self) -> int:
        """Return the size in bytes."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]

    @property
    def published(self) -> tuple[TensorShape, ...]:
        """Return the tensors that a file has in its place."""
        return tuple(TensorShape(name, self.dtype, shape) for name, shape in self.parts) or (self,)


@dataclass(frozen=True)
class FileLayout:
    """Hold the first bytes of the file and the position of each tensor."""

    header: bytes
    offsets: dict[str, int]
    """Tensor name → offset of its first byte in the file."""
    num_bytes: int
    """Size of the file."""


def file_layout(tensors: Iterable[TensorShape]) -> FileLayout:
    """Return the layout of a safetensors file with these tensors.

    Larger types come first, so every tensor is aligned to its elements. The layout depends only on the set of tensors:
    all ranks compute the same one.
    """
    ordered = sorted(tensors, key=lambda tensor: (-_ITEM_BYTES[tensor.dtype], tensor.name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for tensor in ordered:
        starts[tensor.name] = end
        for part in tensor.published:
            offsets = [end, end := end + part.num_bytes]
            entries[part.name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(_HEADER_LENGTH_BYTES, "little") + text
    return FileLayout(header, {name: len(header) + start for name, start in starts.items()}, len(header) + end)
