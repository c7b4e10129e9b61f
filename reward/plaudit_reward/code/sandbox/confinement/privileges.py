"""Drop every privilege of this process for good."""

from __future__ import annotations

import ctypes
import os
import struct

from plaudit_reward.code.sandbox.confinement.seccomp import no_new_privileges, prctl

NOBODY = 65534
"""User and group that own no files (``nobody``)."""

_CAPABILITIES_VERSION_3 = 0x20080522
_PR_SET_DUMPABLE = 4

_libc = ctypes.CDLL(None, use_errno=True)


def drop_privileges() -> None:
    """Become nobody where this is root, drop all capabilities for good, and forbid debuggers.

    A root that may not change its user (in a container with all capabilities dropped) stays root without any of them,
    and has no more rights than an ordinary user.

    Raises:
        OSError: a capability could not be dropped.
    """
    if os.geteuid() == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        except OSError:
            pass
    header = struct.pack("=Ii", _CAPABILITIES_VERSION_3, 0)
    if _libc.capset(header, bytes(24)) != 0:
        raise OSError(ctypes.get_errno(), "capset")
    no_new_privileges()
    forbid_inspection()


def forbid_inspection() -> None:
    """Forbid other processes of this user to read this one's memory or environment, to trace it, or to dump it."""
    prctl(_PR_SET_DUMPABLE, 0)
