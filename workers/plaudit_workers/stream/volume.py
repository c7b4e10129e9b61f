"""Store records that are too large for Redis on the shared volume; Redis then holds a path and a checksum instead.

Rollouts and the trainer write them, every process reads them, the trainer deletes them with their group. A reference in
Redis may be forged, so no path leaves the folder: a record lies in ``<group>/<name>``, both single names, opened
without following links, and only a regular file of the recorded size is read.

A file outlives its group by a minute: Redis may come back without its last second, and restore the group. The trainer
creates the folder; while it is missing, the volume counts as not mounted, and no process writes below the mount point.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import secrets
import shutil
import stat
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec

from plaudit_wire.messages import RecordError, decoder, digest_of
from plaudit_wire.records import INLINE_LIMIT_BYTES

LARGEST_RECORD_BYTES: Final = 512 * 1024 * 1024
"""The longest value that Redis supports; no record needs more."""
_SPILLED = b"\x00"
_LONGEST_NAME = 200
_NAME = re.compile(r"(?!\.)[A-Za-z0-9%._~-]{1,255}")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_LINK = (errno.ELOOP, errno.ENOTDIR)


class LostRecordError(RecordError):
    """The file of a record is permanently lost."""


class VolumeError(RecordError, OSError):
    """The shared volume cannot provide the file now but may later: an outage; retry as for Redis."""


class Spilled(msgspec.Struct, frozen=True, array_like=True):
    """Refer in Redis to a record on the volume."""

    path: str
    """``<group>/<name>`` below the spill folder."""
    size_bytes: int
    digest: str
    """BLAKE2b-128 of the file."""


class SpillFolder:
    """Store large records below one folder that every process of the run can access; None keeps all in Redis.

    The files of a closed group stay for ``kept_s``, after which a missing file counts as lost.
    """

    def __init__(self, folder: Path | None, limit_bytes: int = INLINE_LIMIT_BYTES, kept_s: float = 60.0) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._kept_s = kept_s
        self._closed: deque[tuple[float, str]] = deque()
        self._missing: dict[str, float] = {}

    async def prepare(self, open_groups: Iterable[str]) -> None:
        """Create the folder and delete files of groups that ended long ago; the trainer calls it first.

        Raise ``VolumeError`` if the volume cannot be written.
        """
        if self._folder is None:
            return
        try:
            await asyncio.to_thread(self._prepare, self._folder, {_folder_of(group) for group in open_groups})
        except OSError as error:
            raise VolumeError(f"cannot write to {self._folder}: {error}") from error

    def needed(self, record: bytes, *, memory_is_short: bool = False) -> bool:
        """Return True for a record that belongs on the volume."""
        return self._folder is not None and (memory_is_short or len(record) > self._limit_bytes)

    async def store(self, group: str, name: str, record: bytes) -> bytes:
        """Write a record; return its reference for Redis. Writing the same record again writes the same file.

        Raise ``VolumeError`` if it cannot be written now.
        """
        digest = digest_of(record)
        spilled = Spilled(f"{_folder_of(group)}/{name}-{digest[:12]}", len(record), digest)
        try:
            await asyncio.to_thread(self._write, spilled.path, record)
        except OSError as error:
            raise VolumeError(f"cannot write {spilled.path} in {self._folder}: {error}") from error
        return _SPILLED + msgspec.msgpack.encode(spilled)

    async def load(self, stored: bytes) -> bytes:
        """Return the record for a value from Redis (most often the value itself).

        Raise ``VolumeError`` if the file cannot be read now, ``LostRecordError`` if it is permanently lost, and
        ``RecordError`` if it is damaged, its path leaves the folder, or this process was given no folder.
        """
        if stored[:1] != _SPILLED:
            return stored
        try:
            spilled = decoder(Spilled).decode(stored[1:])
        except msgspec.DecodeError as error:
            raise RecordError(f"a damaged reference to a record on the shared volume: {error}") from error
        record = await asyncio.to_thread(self._read, spilled)
        if digest_of(record) != spilled.digest:
            raise RecordError(f"the file {spilled.path} in {self._folder} is not the one that was written")
        return record

    async def forget(self, group: str) -> None:
        """Delete the files of a group that has ended, ``kept_s`` from now."""
        if self._folder is None:
            return
        self._closed.append((time.monotonic() + self._kept_s, _folder_of(group)))
        while self._closed and self._closed[0][0] <= time.monotonic():
            await asyncio.to_thread(self._remove, self._closed.popleft()[1])

    def _prepare(self, folder: Path, kept: set[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for left in os.scandir(folder):
            if left.name not in kept and time.time() - left.stat(follow_symlinks=False).st_mtime > self._kept_s:
                self._remove(left.name)

    def _write(self, path: str, record: bytes) -> None:
        assert self._folder is not None
        target = self._folder / path
        target.parent.mkdir(exist_ok=True)
        temporary = target.with_name(f"{target.name}.{secrets.token_hex(8)}.partial")
        temporary.write_bytes(record)
        temporary.replace(target)

    def _read(self, spilled: Spilled) -> bytes:
        if self._folder is None:
            raise RecordError(
                f"the record is in {spilled.path} on the shared volume, and this process has no spill folder"
            )
        group, _, name = spilled.path.partition("/")
        if not _NAME.fullmatch(group) or not _NAME.fullmatch(name):
            raise RecordError(f"{spilled.path!r} is not the path of a spilled record (<group>/<name>)")
        try:
            with (
                _opened(self._folder, _FOLDER & ~os.O_NOFOLLOW) as top,
                _opened(group, _FOLDER, top) as folder,
                _opened(name, _FILE, folder) as file,
            ):
                return _whole_file(file, spilled)
        except OSError as error:
            if error.errno in _LINK:
                raise RecordError(f"{spilled.path} in {self._folder} leads through a link") from error
            if error.errno == errno.ENOENT and self._is_lost(spilled.path):
                raise LostRecordError(f"{spilled.path} in {self._folder} is lost") from error
            raise VolumeError(f"cannot read {spilled.path} in {self._folder}: {error}") from error

    def _is_lost(self, path: str) -> bool:
        """Return True for a file that was missing on a mounted volume for longer than NFS caches can explain."""
        assert self._folder is not None
        if not self._folder.is_dir():
            self._missing.clear()
            return False
        return time.monotonic() - self._missing.setdefault(path, time.monotonic()) > self._kept_s

    def _remove(self, group: str) -> None:
        try:
            with _opened(str(self._folder), _FOLDER & ~os.O_NOFOLLOW) as top:
                shutil.rmtree(group, ignore_errors=True, dir_fd=top)
        except OSError:
            return  # the folder does not exist yet, or the volume is unavailable: leftover files cost only space


@contextmanager
def _opened(path: str | Path, flags: int, folder: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _whole_file(file: int, spilled: Spilled) -> bytes:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise RecordError(f"{spilled.path} is not a regular file")
    if status.st_size != spilled.size_bytes or status.st_size > LARGEST_RECORD_BYTES:
        raise RecordError(
            f"{spilled.path} has {status.st_size} bytes; {spilled.size_bytes} were written, "
            f"and at most {LARGEST_RECORD_BYTES} are read"
        )
    with os.fdopen(os.dup(file), "rb") as stream:
        return stream.read(spilled.size_bytes)


def _folder_of(group: str) -> str:
    """Return a group's id as a single file name: clients of a scoring service choose a part of the id."""
    name = quote(group, safe="")
    if len(name) > _LONGEST_NAME or not name:
        return digest_of(group.encode())
    return name if name[0] != "." else f"%2E{name[1:]}"
