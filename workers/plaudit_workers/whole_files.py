"""Folders and files that are there as a whole or not at all. Used by ``publish``, ``checkpoint`` and ``store``.

What is written lies under a hidden temporary name, is flushed to the disk, and gets its own name by one rename. A
process that dies on the way leaves a hidden leftover, which the next writer of the same folder removes.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from plaudit_workers.process import RefusedError

TEMPORARY = ".incomplete-"
"""Names that begin so are nobody's; readers pass over them."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Gives an empty folder to write into; it becomes ``target`` when the block ends without an error.

    A ``target`` that exists is replaced.

    Raises:
        RefusedError: the disk is full; nothing of the new folder stays.
    """
    with _whole(target) as temporary:
        temporary.mkdir(parents=True)
        yield temporary
        for path in sorted(temporary.rglob("*")):
            _flush(path)
        _flush(temporary)


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Gives a path to write a file to; it becomes ``target``, replacing what is there, as ``whole_folder`` does."""
    with _whole(target) as temporary:
        yield temporary
        _flush(temporary)


@contextmanager
def _whole(target: Path) -> Iterator[Path]:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f"{TEMPORARY}{target.name}"
    remove(temporary)
    try:
        yield temporary
        _put_in_place(temporary, target)
    except BaseException as error:
        remove(temporary)
        if isinstance(error, Exception) and is_full(error):
            free = shutil.disk_usage(target.parent).free
            raise RefusedError(
                f"no room for {target}: the disk, a quota or a file size limit is reached ({free:,} bytes free). "
                "Make room, or keep fewer checkpoints (trainer.checkpoint.keep), then start again with --resume"
            ) from error
        raise


def _put_in_place(temporary: Path, target: Path) -> None:
    if target.is_dir():
        # A folder cannot be renamed over a full one. Died in between: the new one is lost, older ones are there.
        remove(target)
    temporary.rename(target)
    _flush(target.parent)


def remove(path: Path) -> None:
    """Removes a file or a folder with all in it, if it is there. A folder loses its name first, in one go."""
    if path.is_dir() and not path.is_symlink():
        doomed = path
        if not path.name.startswith(TEMPORARY):
            doomed = path.parent / f"{TEMPORARY}removed-{path.name}"
            shutil.rmtree(doomed, ignore_errors=True)
            path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Removes what a process that died left half written."""
    for path in folder.glob(f"{TEMPORARY}*"):
        remove(path)


def is_full(error: BaseException) -> bool:
    """Whether an error, or one that it came from, says that nothing more can be written."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return True
        # Safetensors and torch write from Rust and C++: their errors carry only the system's words.
        if any(f"os error {number}" in str(cause) or os.strerror(number) in str(cause) for number in _FULL):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
