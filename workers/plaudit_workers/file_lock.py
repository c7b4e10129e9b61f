"""Hold a file's lock as long as its writer lives: the kernel releases it when the process ends, however it ends.

The lock is advisory (``flock``). It holds between processes of one host, and between hosts on NFSv4, CephFS and other
volumes that share locks. Some volumes refuse ``flock``: there a lock belongs to the process that created its file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path
from typing import Self

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
ABANDONED_AFTER_S = 3600.0
"""On a volume without locks, a file that has not changed for so long counts as abandoned."""


class FileLock:
    """Hold a locked file; ``release`` deletes it. Made by ``acquire`` and ``try_acquire``."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    @classmethod
    def acquire(cls, path: Path) -> Self:
        """Create the file if it is missing and lock it; wait while another process holds the lock.

        Raises:
            OSError: the folder is missing.
        """
        while True:
            descriptor = _open(path)
            try:
                _lock(descriptor, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    os.close(descriptor)
                    raise
            if _is_at(path, descriptor):
                return cls(path, descriptor)
            os.close(descriptor)  # the holder before deleted the file: the lock of that file excludes nobody

    @classmethod
    def try_acquire(cls, path: Path) -> Self | None:
        """Create the file if it is missing and lock it; return None if its holder lives.

        On a volume without locks, a file that exists already has a holder until it is ``ABANDONED_AFTER_S`` old.

        Raises:
            OSError: the folder is missing.
        """
        descriptor, created = _create_or_open(path)
        try:
            _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = _is_at(path, descriptor)
        except BlockingIOError:
            free = False
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                os.close(descriptor)
                raise
            free = created or time.time() - os.fstat(descriptor).st_mtime > ABANDONED_AFTER_S
        if free:
            return cls(path, descriptor)
        os.close(descriptor)
        return None

    def release(self) -> None:
        """Delete the file, then unlock it."""
        if _is_at(self._path, self._descriptor):
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _create_or_open(path: Path) -> tuple[int, bool]:
    """Return a descriptor, and True if this process created the file."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), True
    except FileExistsError:
        return _open(path), False


def _lock(descriptor: int, operation: int) -> None:
    fcntl.flock(descriptor, operation)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
