"""Records too large for Redis, on the shared volume; Redis then holds a path and a checksum in their place.

Written by rollouts and the trainer, read by everyone, deleted with the group by the trainer.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from pathlib import Path

import msgspec

from plaudit_wire.codec import RecordError, decoder
from plaudit_wire.limits import INLINE_LIMIT_BYTES

_SPILLED = b"\x00"


class VolumeError(RecordError):
    """The shared volume does not give the file now; it may later."""


class Spilled(msgspec.Struct, frozen=True, array_like=True):
    """What stands in Redis for a record on the volume."""

    path: str
    """Below the spill folder."""
    size_bytes: int
    digest: str
    """BLAKE2b-128 of the file."""


class SpillFolder:
    """Stores large records below one folder that every process of the run sees.

    Args:
        folder: the folder; None keeps every record in Redis.
        limit_bytes: records above it are spilled.
    """

    def __init__(self, folder: Path | None, limit_bytes: int = INLINE_LIMIT_BYTES) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes

    def needed(self, record: bytes, *, memory_is_short: bool = False) -> bool:
        """Whether a record belongs on the volume."""
        return self._folder is not None and (memory_is_short or len(record) > self._limit_bytes)

    async def store(self, group: str, name: str, record: bytes) -> bytes:
        """Writes a record; returns what to put into Redis. The same record again writes the same file."""
        digest = _digest(record)
        spilled = Spilled(f"{group}/{name}-{digest[:12]}", len(record), digest)
        await asyncio.to_thread(self._write, spilled.path, record)
        return _SPILLED + msgspec.msgpack.encode(spilled)

    async def load(self, stored: bytes) -> bytes:
        """The record behind what Redis holds (most often that itself).

        Raises:
            VolumeError: the file cannot be read.
            RecordError: it is damaged, or this process knows no spill folder.
        """
        if stored[:1] != _SPILLED:
            return stored
        spilled = decoder(Spilled).decode(stored[1:])
        record = await asyncio.to_thread(self._read, spilled.path)
        if len(record) != spilled.size_bytes or _digest(record) != spilled.digest:
            raise RecordError(f"the file {spilled.path} in {self._folder} is not what was written there")
        return record

    async def forget(self, group: str) -> None:
        """Deletes what a group left on the volume."""
        if self._folder is not None and (self._folder / group).is_dir():
            await asyncio.to_thread(shutil.rmtree, self._folder / group, ignore_errors=True)

    def _write(self, path: str, record: bytes) -> None:
        assert self._folder is not None
        target = self._folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{target.name}.{os.getpid()}.partial")
        temporary.write_bytes(record)
        temporary.replace(target)

    def _read(self, path: str) -> bytes:
        if self._folder is None:
            raise RecordError(f"the record lies in {path} on the shared volume, and this process was given no folder")
        try:
            return (self._folder / path).read_bytes()
        except OSError as error:
            raise VolumeError(f"cannot read {path} in {self._folder}: {error}") from error


def _digest(record: bytes) -> str:
    return hashlib.blake2b(record, digest_size=16).hexdigest()
