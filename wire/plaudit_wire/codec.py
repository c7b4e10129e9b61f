"""Encode and decode the records that travel between processes: one byte of schema version, then msgpack."""

from __future__ import annotations

import hashlib
from typing import Any, Final, TypeVar

import msgspec

SCHEMA_VERSION: Final = 1
"""First byte of every encoded record; increased when a field changes its meaning. 0 marks a spilled record."""


class RecordError(Exception):
    """A record that this version cannot read: another schema version, or damaged."""


class SchemaVersionError(RecordError):
    """A record of another schema version: a process of that version can read it."""


Record = TypeVar("Record")
_encoder = msgspec.msgpack.Encoder()
_VERSION_BYTE = bytes([SCHEMA_VERSION])


_decoders: dict[type[Any], msgspec.msgpack.Decoder[Any]] = {}


def decoder(kind: type[Record]) -> msgspec.msgpack.Decoder[Record]:
    """Return the decoder of one type, built once."""
    if kind not in _decoders:
        _decoders[kind] = msgspec.msgpack.Decoder(kind)
    return _decoders[kind]


def encode(record: msgspec.Struct) -> bytes:
    """Encode a record for a stream or a hash."""
    return _VERSION_BYTE + _encoder.encode(record)


def digest_of(data: bytes) -> str:
    """Return the BLAKE2b-128 digest of data, as hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def decode(data: bytes, kind: type[Record]) -> Record:
    """Decode a record that ``encode`` wrote; raise ``RecordError`` if it is damaged, or of another version or type."""
    if not data:
        raise RecordError(f"an empty {kind.__name__}")
    if data[:1] != _VERSION_BYTE:
        raise SchemaVersionError(
            f"a {kind.__name__} of schema version {data[:1].hex()}; this process reads {SCHEMA_VERSION}: "
            "run the same version of Plaudit in every process"
        )
    try:
        return decoder(kind).decode(memoryview(data)[1:])
    except msgspec.DecodeError as error:
        raise RecordError(f"a damaged {kind.__name__}: {error}") from error
