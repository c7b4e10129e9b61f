"""Gives up every privilege of this process for good."""

from __future__ import annotations

import ctypes
import os
import struct

from plaudit_reward.code.sandbox.seccomp import no_new_privileges, prctl

NOBODY = 65534
"""The user and group that Linux reserves for nobody's files."""

_CAPABILITIES_VERSION_3 = 0x20080522
_PR_SET_DUMPABLE = 4

_libc = ctypes.CDLL(None, use_errno=True)


def drop_privileges() -> None:
    """Becomes nobody where this is root, without a capability and without a way to one; no debugger may attach.

    A root that may not change its user (a container with all capabilities dropped) stays root without any capability,
    which is no more than an ordinary user.

    Raises:
        OSError: a capability could not be given up.
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
    """No other process of this user may read this one's memory or environment, trace it, or leave a dump of it.

    Raises:
        OSError: the kernel refuses.
    """
    prctl(_PR_SET_DUMPABLE, 0)
