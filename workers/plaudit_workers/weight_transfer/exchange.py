"""Define the protocol of one connection between a rollout and a rank of the trainer.

1. The trainer sends a nonce of 32 bytes.
2. The rollout sends a frame with the version that it wants and HMAC-SHA256 of nonce and version under the token. The
   token is in the announcement, so only processes that may read the run's state in Redis have it.
3. The trainer sends a frame with the table of its part (``part.Contents``). A wrong proof, or a version that it does
   not hold any more, closes the connection at once.
4. The rollout sends ``GO`` when it has the tables of all ranks and is ready for this one's blocks. The rank keeps the
   version for it until then, so one that is published meanwhile does not break the transfer.
5. The trainer sends the blocks and closes.

The rollout checks the table against the digest in the announcement and each block against the table. So neither side
trusts the network; the weights themselves are not encrypted. A frame is its length (4 bytes, big endian) and msgpack.
"""

from __future__ import annotations

import hashlib
import hmac
import socket

import msgspec

from plaudit_wire.messages import PolicyVersion

NONCE_BYTES = 32
HANDSHAKE_WITHIN_S = 10.0
"""Time for a connection, and for each message before the first block."""
GO = b"g"
GO_WITHIN_S = 3600.0
"""Time until a rollout asks for the blocks, during which it receives those of other ranks."""
STALLED_AFTER_S = 30.0
"""A connection is given up when a read, or the sending of one block, takes longer."""
MAX_REQUEST_BYTES = 1024
_LENGTH_BYTES = 4


class TransferError(Exception):
    """Report that weights could not be received: the peer is gone, stalled, or sent other bytes than announced."""


class WeightsRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request a version. Written by the receiver, read by the server."""

    version: PolicyVersion
    proof: bytes


def make_request(token: str, nonce: bytes, version: PolicyVersion) -> bytes:
    """Return the encoded request of a version."""
    return msgspec.msgpack.encode(WeightsRequest(version, _proof(token, nonce, version)))


def is_authentic(request: WeightsRequest, token: str, nonce: bytes) -> bool:
    """Return True if the sender of the request knows the token."""
    return hmac.compare_digest(request.proof, _proof(token, nonce, request.version))


def _proof(token: str, nonce: bytes, version: PolicyVersion) -> bytes:
    return hmac.digest(token.encode(), nonce + str(version).encode(), hashlib.sha256)


def send_frame(connection: socket.socket, content: bytes) -> None:
    """Send one frame."""
    connection.sendall(len(content).to_bytes(_LENGTH_BYTES, "big") + content)


def receive_frame(connection: socket.socket, max_bytes: int) -> bytes:
    """Receive one frame.

    Raises:
        TransferError: the peer closed the connection, or the frame is larger than ``max_bytes``.
        OSError: the connection broke or stalled.
    """
    length = int.from_bytes(receive_bytes(connection, _LENGTH_BYTES), "big")
    if length > max_bytes:
        raise TransferError(f"the peer announced a frame of {length:,} bytes; at most {max_bytes:,} are allowed")
    return receive_bytes(connection, length)


def receive_bytes(connection: socket.socket, count: int) -> bytes:
    """Receive exactly ``count`` bytes; raise like ``receive_frame``."""
    content = bytearray(count)
    receive_into(connection, memoryview(content))
    return bytes(content)


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fill ``target``; raise like ``receive_frame``."""
    while target:
        received = connection.recv_into(target)
        if not received:
            raise TransferError("the peer closed the connection")
        target = target[received:]
