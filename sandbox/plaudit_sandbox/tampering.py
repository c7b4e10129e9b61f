"""Tell from the changes that an agent made to its image whether the tests can still believe the image's programs.

An agent that is root in its container may replace ``bash``, add a module beside Python's own, or name a library in
``ld.so.preload``. Which of these a test would use cannot be known, so every change below the folders of programs
counts. Compiled Python does not: tests run with ``PYCACHE_ELSEWHERE``, which makes Python ignore it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import PurePosixPath
from typing import Final

PYCACHE_ELSEWHERE: Final = {"PYTHONPYCACHEPREFIX": "/run/pycache"}
_TOP_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_FOLDERS = (*_TOP_FOLDERS, "/usr")
_READ_BY_PROGRAMS = (
    "/etc/alternatives",
    "/etc/bash.bashrc",
    "/etc/environment",
    "/etc/gitconfig",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/ld.so.preload",
    "/etc/nsswitch.conf",
    "/etc/pip.conf",
    "/etc/profile",
    "/etc/profile.d",
)


PROGRAM_FOLDERS: Final = (*_FOLDERS, *_READ_BY_PROGRAMS)


def changed_programs(
    changes: Iterable[str], path_variable: str, workdir: str, is_folder: Callable[[str], bool]
) -> list[str]:
    """Return the changed paths that a program of the tests could run or read by itself, sorted.

    Args:
        changes: Every path that was added, changed or removed. A folder may be among them because of what it holds.
        path_variable: The image's ``PATH``. Its folders, and ``lib`` beside a ``bin``, hold programs.
        workdir: Programs below it are the agent's work, even if ``PATH`` names their folder.
        is_folder: Asked for a path whose content did not change.
    """
    found = set(changes)
    holders = {str(parent) for path in found for parent in PurePosixPath(path).parents}
    folders = (*PROGRAM_FOLDERS, *_folders_of(path_variable, workdir))
    return sorted(
        path
        for path in found - holders
        if _is_below(path, folders)
        and "__pycache__" not in PurePosixPath(path).parts
        and (path in _TOP_FOLDERS or not is_folder(path))
    )


def _folders_of(path_variable: str, workdir: str) -> list[str]:
    named = [PurePosixPath(each) for each in path_variable.split(":") if each.startswith("/")]
    beside = [each.with_name("lib") for each in named if each.name == "bin" and each.parent != PurePosixPath("/")]
    return [str(each) for each in (*named, *beside) if not each.is_relative_to(workdir)]


def _is_below(path: str, folders: Iterable[str]) -> bool:
    """Tell whether a path is one of the folders or below one; ``/etc/python3.11`` and its kin count as well."""
    return path.startswith("/etc/python") or any(path == each or path.startswith(f"{each}/") for each in folders)
