"""Write files and folders atomically: readers see all of one or nothing. Used for weights, checkpoints and samples.

New content is written under a hidden temporary name, flushed to disk and renamed. A folder that is replaced is renamed
aside first and deleted last, so a process that is killed at any instant leaves the old or the new one whole;
``recover`` gives a folder that was set aside its name back.
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
"""Prefix of unfinished files and folders; readers ignore them."""
REPLACED = ".replaced-"
"""Prefix of a whole folder that was renamed aside to make room for its replacement."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder to write into; rename it to ``target`` when the block ends without an error.

    An existing ``target`` is replaced; it is deleted only after the new folder has its name.

    Raises:
        RefusedError: the disk is full; the new folder is removed and the old one is unchanged.
    """
    with _whole(target) as temporary:
        temporary.mkdir(parents=True)
        yield temporary
        for path in sorted(temporary.rglob("*")):
            _flush(path)
        _flush(temporary)


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Yield a path to write a file to; rename it over ``target`` when the block ends without an error."""
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
        recover(target)
        if isinstance(error, Exception) and is_full(error):
            free = shutil.disk_usage(target.parent).free
            raise RefusedError(
                f"no room for {target}: the disk, a quota or a file size limit is reached ({free:,} bytes free). "
                "Make room, or keep fewer checkpoints (trainer.checkpoint.keep), then start again with --resume"
            ) from error
        raise


def _put_in_place(temporary: Path, target: Path) -> None:
    recover(target)
    aside = _aside(target)
    if target.is_dir():  # a folder cannot be renamed over one that is not empty
        target.rename(aside)
        _flush(target.parent)
    temporary.rename(target)
    _flush(target.parent)
    remove(aside)


def recover(target: Path) -> None:
    """Finish a replacement that was interrupted: rename the old folder back, or delete it if the new one is in place.

    Only the writer of ``target`` may call this.
    """
    aside = _aside(target)
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


def _aside(target: Path) -> Path:
    return target.parent / f"{REPLACED}{target.name}"


def remove(path: Path) -> None:
    """Remove a file or folder with its content, if it exists. A folder is renamed first: readers see no part."""
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
    """Remove what a killed process left unfinished, after recovering interrupted replacements."""
    recover_all(folder)
    for path in folder.glob(f"{TEMPORARY}*"):
        remove(path)


def is_full(error: BaseException) -> bool:
    """Return True if the error or one of its causes means that the disk, a quota or a size limit is reached."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return True
        # Safetensors and torch write from Rust and C++: their errors carry only the message.
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
