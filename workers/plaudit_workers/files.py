"""Write files and folders atomically: readers see all of one or nothing. Used for weights, checkpoints and samples.

New content is written in a hidden temporary folder, flushed to disk and renamed. Each writer has a temporary folder of
its own and holds a lock in it, so a second writer of the same name (a trainer and its successor) neither writes into it
nor removes it; what a dead writer left behind is removed. A folder that is replaced is renamed aside first and deleted
last, so a process that is killed at any instant leaves the old or the new one whole; ``recover`` gives a folder that
was set aside its name back.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Self

from plaudit_wire.errors import RefusedError, causes

TEMPORARY = ".incomplete-"
"""Prefix of unfinished files and folders; readers ignore them."""
REPLACED = ".replaced-"
"""Prefix of a whole folder that was renamed aside to make room for its replacement."""
ABANDONED_AFTER_S = 3600.0
"""On a volume without locks, a file that has not changed for so long counts as abandoned."""
_LOCK = ".lock"
_REPLACING = "replacing-"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_SWEPT = (FileNotFoundError, NotADirectoryError)
"""Another process removed a temporary folder; one that swept a moment later may hold a file in its place."""


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder to write into; rename it to ``target`` when the block ends without an error.

    An existing ``target`` is replaced; it is deleted only after the new folder has its name.

    Raises:
        RefusedError: the disk is full; the new folder is removed and the old one is unchanged.
    """
    with _put_whole(target) as temporary:
        temporary.mkdir()
        yield temporary
        for path in sorted(temporary.rglob("*")):
            _flush(path)
        _flush(temporary)


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Yield a path to write a file to; rename it over ``target`` when the block ends without an error."""
    with _put_whole(target) as temporary:
        yield temporary
        _flush(temporary)


@contextmanager
def _put_whole(target: Path) -> Iterator[Path]:
    target.parent.mkdir(parents=True, exist_ok=True)
    folder, lock = temporary_folder(target)
    try:
        yield folder / target.name
        _put_in_place(folder / target.name, target)
    except BaseException as error:
        if isinstance(error, Exception) and is_full(error):
            remove(folder)  # before the free bytes are counted
            free = shutil.disk_usage(target.parent).free
            raise RefusedError(
                f"no room for {target}: the disk, a quota or a file size limit is reached ({free:,} bytes free). "
                "Make room, then repeat the command; a run goes on with --resume, and fewer checkpoints "
                "(trainer.checkpoint.keep) need less"
            ) from error
        raise
    finally:
        remove(folder)
        lock.release()


def temporary_folder(target: Path) -> tuple[Path, FileLock]:
    """Create a folder of this process's own beside the target, with a lock that shows that the process lives.

    Those that dead processes left for the same target are removed.
    """
    _sweep(target.parent, f"{TEMPORARY}{glob.escape(target.name)}*")
    while True:
        folder = target.parent / f"{TEMPORARY}{target.name}-{secrets.token_hex(8)}"
        folder.mkdir()
        try:
            lock = FileLock.try_acquire(folder / _LOCK)
        except _SWEPT:
            continue  # another process swept the folder before it was locked
        if lock is not None:
            return folder, lock


def _put_in_place(temporary: Path, target: Path) -> None:
    if not temporary.is_dir():
        temporary.rename(target)
        _flush(target.parent)
        return
    with _replacing(target):
        _recover(target)
        aside = _aside_path(target)
        if target.is_dir():  # a folder cannot be renamed over one that is not empty
            target.rename(aside)
            _flush(target.parent)
        try:
            temporary.rename(target)
        finally:
            _recover(target)
        _flush(target.parent)


@contextmanager
def _replacing(target: Path) -> Iterator[None]:
    """Let one writer at a time replace the target."""
    lock = FileLock.acquire(target.parent / f"{TEMPORARY}{_REPLACING}{target.name}")
    try:
        yield
    finally:
        lock.release()


def recover(target: Path) -> None:
    """Finish a replacement that was interrupted: rename the old folder back, or delete it if the new one is in place.

    Waits for a replacement in progress.
    """
    if _aside_path(target).exists():
        with _replacing(target):
            _recover(target)


def _recover(target: Path) -> None:
    aside = _aside_path(target)
    if not aside.exists():
        return
    if target.exists():
        remove(aside)
    else:
        aside.rename(target)
        _flush(target.parent)


def recover_all(folder: Path) -> None:
    """Finish every interrupted replacement in ``folder``; see ``recover``."""
    for aside in sorted(folder.glob(f"{REPLACED}*")):
        recover(folder / aside.name.removeprefix(REPLACED))


def _aside_path(target: Path) -> Path:
    return target.parent / f"{REPLACED}{target.name}"


def remove(path: Path) -> None:
    """Remove a file or folder with its content, if it exists. A folder is renamed first: readers see no part."""
    if path.is_dir() and not path.is_symlink():
        doomed = path
        if not path.name.startswith(TEMPORARY):
            doomed = path.parent / f"{TEMPORARY}removed-{path.name}-{secrets.token_hex(8)}"
            with suppress(FileNotFoundError):  # another process removed it meanwhile
                path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left unfinished, after recovering interrupted replacements.

    Files and folders whose writer lives, here or on another host, stay.
    """
    recover_all(folder)
    _sweep(folder, f"{TEMPORARY}*")


def _sweep(folder: Path, pattern: str) -> None:
    for path in folder.glob(pattern):
        with suppress(*_SWEPT):  # its writer has finished meanwhile
            lock = FileLock.try_acquire(path / _LOCK if path.is_dir() else path)
            if lock is not None:
                remove(path)
                lock.release()


def is_ours(file: IO[Any]) -> bool:
    """Lock an open file until it is closed; return False if another process holds it.

    The kernel releases the lock when its process ends, however it ends. A volume without locks has none.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def lock_output(file: IO[bytes], path: Path) -> None:
    """Keep an open output for this process, until it is closed; raise ``RefusedError`` if another one writes it."""
    if path.is_file() and not is_ours(file):  # all share a device
        raise RefusedError(f"{path} belongs to a command that is under way. Wait for it, or name another --output")


def refuse_inputs(output: Path, inputs: Iterable[Path]) -> None:
    """Raise ``RefusedError`` if an output is one of the inputs, which writing would destroy, under any name."""
    for path in inputs:
        with suppress(OSError):  # one of them does not exist
            if os.path.samefile(output, path):
                raise RefusedError(
                    f"--output {output} is the input {path}: name another file, writing would destroy it"
                )


def is_full(error: BaseException) -> bool:
    """Return True if the error or one of its causes means that the disk, a quota or a size limit is reached."""
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return True
        # Safetensors and torch write from Rust and C++: their errors carry only the message.
        if any(f"os error {number}" in str(cause) or os.strerror(number) in str(cause) for number in _FULL):
            return True
    return False


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FileLock:
    """Hold a locked file as long as its writer lives; ``release`` deletes it. Made by ``acquire`` and ``try_acquire``.

    The kernel releases the lock when the process ends, however it ends. The lock is advisory (``flock``). It holds
    between processes of one host, and between hosts on NFSv4, CephFS and other volumes that share locks. Some volumes
    refuse ``flock``: there a lock belongs to the process that created its file.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    @classmethod
    def acquire(cls, path: Path) -> Self:
        """Create the file if it is missing and lock it; wait while another process holds the lock."""
        while True:
            descriptor = os.open(path, _OPEN, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
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
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
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


def _create_or_open(path: Path) -> tuple[int, bool]:
    """Return a descriptor, and True if this process created the file."""
    try:
        return os.open(path, _OPEN | os.O_EXCL, 0o644), True
    except FileExistsError:
        return os.open(path, _OPEN, 0o644), False


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except _SWEPT:
        return False
