"""Restrict the files that a sandboxed program may open, by Landlock.

A ruleset is made once, by a process that can open the folders; every program restricts itself with it, so that each
has a domain of its own, from which no process outside can be traced or (ABI 6) signalled. Structures and rights
are those of ``linux/landlock.h``; a kernel is asked only for what its ABI knows.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION = 1
_PATH_BENEATH = 1

_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3

_NUM_FILE_RIGHTS: Final = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""ABI → rights on files that it knows, the lowest bits; newer versions know at least those of 5."""
_NETWORK_RIGHTS = 0b11
"""Binding and connecting TCP sockets, since ABI 4."""
_SIGNALS = 0b10
_SCOPES = 0b01 | _SIGNALS
"""Abstract Unix sockets and signals stay inside the domain, since ABI 6."""
_SCOPES_SINCE = 6

_libc = ctypes.CDLL(None, use_errno=True)


def abi() -> int:
    """Return the version of Landlock of this kernel; 0 when it has none, or was started without it."""
    version: int = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_ASK_VERSION))
    return max(0, version)


def make_ruleset(readable: Iterable[Path]) -> int:
    """Make a ruleset that allows to read files in these folders, and nothing else; return its file descriptor.

    Args:
        readable: folders and files; missing ones, and those that this process may not open, are left out.

    Raises:
        OSError: this kernel has no Landlock.
    """
    version = abi()
    rights = (1 << _NUM_FILE_RIGHTS[min(version, 5)]) - 1 if version else 0
    parts = [rights, _NETWORK_RIGHTS if version >= 4 else None, _SCOPES if version >= _SCOPES_SINCE else None]
    attributes = b"".join(struct.pack("=Q", part) for part in parts if part is not None)
    ruleset = _call(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    for path in readable:
        _allow_reading(ruleset, path)
    return ruleset


def keep_signals_inside() -> bool:
    """Forbid this thread, and all that it starts, to signal processes outside; ``no_new_privs`` must be set.

    Files and network stay as they are.

    Returns:
        False where this kernel has no such scope (before Linux 6.12).
    """
    if abi() < _SCOPES_SINCE:
        return False
    attributes = struct.pack("=QQQ", 0, 0, _SIGNALS)
    ruleset = _call(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    restrict(ruleset)
    os.close(ruleset)
    return True


def _allow_reading(ruleset: int, path: Path) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        rights = _READ_FILE | _READ_FOLDER if path.is_dir() else _READ_FILE
        rule = struct.pack("=Qi", rights, opened)
        _call(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0))
    finally:
        os.close(opened)


def restrict(ruleset: int) -> None:
    """Restrict this thread, and all that it starts, for good; ``no_new_privs`` must be set."""
    _call(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))


def _call(number: int, *arguments: object) -> int:
    result: int = _libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        missing = code in (errno.ENOSYS, errno.EOPNOTSUPP)
        raise OSError(code, "this kernel has no Landlock" if missing else os.strerror(code))
    return result
