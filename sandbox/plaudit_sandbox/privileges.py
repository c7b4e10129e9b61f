"""Give up rights of this process, for good, and tie it to its parent.

It loads little, because processes that are forked for each command load it, and forking copies what is loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
from typing import Final

NOBODY: Final = 65534
"""User and group that own no files (``nobody``)."""
_CAPABILITIES_VERSION_3 = 0x20080522
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_libc = ctypes.CDLL(None, use_errno=True)


def end_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent, ``parent``, ends. Called in the child.

    A change of user takes it back; an exec keeps it.
    """
    prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)  # it ended before the line above


def no_new_privileges() -> None:
    """Forbid this process to gain privileges; the kernel requires it of a process that confines itself without any."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def prctl(option: int, first: int, second: int = 0) -> None:
    """Call ``prctl``; raise ``OSError`` if the kernel refuses."""
    arguments = [ctypes.c_ulong(value) for value in (first, second, 0, 0)]
    if _libc.prctl(option, *arguments) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


_ACROSS = 1 << 16 | 1 << 17 | 1 << 19 | 1 << 21 | 1 << 38 | 1 << 39
"""Modules, raw input and output, ptrace, administration, perfmon, bpf: with these a root sees other processes all the
same (``linux/capability.h``; with perfmon the kernel does not even ask Landlock)."""


def forgo_capabilities() -> None:
    """Drop, for good, the capabilities with which a root looks into other processes; ``no_new_privs`` must be set."""
    header = struct.pack("=Ii", _CAPABILITIES_VERSION_3, 0)
    held = ctypes.create_string_buffer(24)
    if _libc.capget(header, held) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    words = struct.unpack("=6I", held.raw)  # effective, permitted, inheritable: first the lower halves, then the upper
    kept = [word & ~(_ACROSS >> (32 * (place // 3)) & 0xFFFFFFFF) for place, word in enumerate(words)]
    if _libc.capset(header, struct.pack("=6I", *kept)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def drop_privileges() -> None:
    """Become nobody where this is root, drop all capabilities for good, and forbid debuggers.

    A root that may not change its user (in a container with all capabilities dropped) stays root without any of them,
    and has no more rights than an ordinary user. Raises ``OSError`` if a capability cannot be dropped.
    """
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
    drop_capabilities()
    no_new_privileges()
    forbid_inspection()


def drop_capabilities() -> None:
    """Drop all capabilities for good; raise ``OSError`` if the kernel refuses."""
    header = struct.pack("=Ii", _CAPABILITIES_VERSION_3, 0)
    if _libc.capset(header, bytes(24)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def forbid_inspection() -> None:
    """Forbid other processes of this user to read this one's memory or environment, to trace it, or to dump it."""
    prctl(_PR_SET_DUMPABLE, 0)


def limit_for_good(kind: int, value: int) -> None:
    """Set a resource limit of this process, soft and hard; a hard limit that is lower stays."""
    hard = resource.getrlimit(kind)[1]
    lowest = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (lowest, lowest))
