"""Build and install the BPF program that decides which system calls a sandboxed program may make.

Calls are denied by default. A program cannot start a process (``clone`` only with ``CLONE_THREAD``) or exec one, open
a socket, or signal, trace, limit or pin another process; it has no io_uring, namespace, mount, key, bpf or perf. The
instructions are those of ``linux/bpf_common.h``, the data they read is ``struct seccomp_data`` (``linux/seccomp.h``). A
filter cannot be removed, and needs no privilege once ``no_new_privs`` is set.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Iterator

from plaudit_reward.code.sandbox.confinement.syscalls import (
    ALLOWED,
    ARCHITECTURES,
    CHECKED,
    FIRST_X32,
    OPENING,
    Architecture,
)
from plaudit_wire.errors import ConfigurationError

_LOAD, _EQUAL, _GREATER_EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in ``seccomp_data``; each argument has eight bytes, the lower half first."""

_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_REFUSE = _ERRNO | errno.EPERM

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2

_CLONE_THREAD = 0x00010000
_THREAD_FLAGS = 0x007D0F00
"""The flags with which C libraries start a thread: memory, files and signal handlers are shared."""

_FCNTL = (0, 1, 2, 3, 1030)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC; with F_SETOWN and F_SETFL the kernel would signal others."""

_SIGKILL = 9
"""Refused even to itself: a program that dies of it would look like a machine that is out of memory."""

_Instruction = tuple[int, int, int, int]
"""Operation, number of instructions to skip when it is true and when it is false, operand."""


def architecture() -> Architecture:
    """Return this machine's architecture; raise ``ConfigurationError`` where its system calls are unknown."""
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise ConfigurationError(
            f"the local sandbox runs on {' and '.join(ARCHITECTURES)}, not on {machine}: name a Sandbox Fusion server "
            "in the scorer's url"
        )
    return ARCHITECTURES[machine]


def filter_program(machine: Architecture, pid: int, *, opens: bool) -> bytes:
    """Return the filter for one process, which may signal itself only: an array of ``struct sock_filter``.

    Args:
        opens: True when files may be opened; Landlock then decides which.
    """
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in _instructions(machine, pid, opens))


def _instructions(machine: Architecture, pid: int, opens: bool) -> Iterator[_Instruction]:
    yield (_LOAD, 0, 0, _ARCHITECTURE)
    yield from _unless(_EQUAL, machine.audit, _KILL)
    yield (_LOAD, 0, 0, _NUMBER)
    yield from _when(_GREATER_EQUAL, FIRST_X32, _KILL)
    for number in _numbers(machine, ALLOWED | (OPENING if opens else {})):
        yield from _when(_EQUAL, number, _ALLOW)
    for name, body in _checks(pid).items():
        (number,) = _numbers(machine, {name: CHECKED[name]})
        yield (_EQUAL, 0, len(body), number)
        yield from body
    for number in _numbers(machine, {} if opens else OPENING):
        yield from _when(_EQUAL, number, _ERRNO | errno.EACCES)
    yield from _when(_GREATER_EQUAL, machine.last + 1, _ERRNO | errno.ENOSYS)  # the C library then takes an older call
    yield (_RETURN, 0, 0, _REFUSE)


def _checks(pid: int) -> dict[str, list[_Instruction]]:
    """Return the instructions that decide each call; all end with a return."""
    refuse, allow = (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)
    kill, tgkill = (
        [_argument(0), *_unless(_EQUAL, pid, _REFUSE), _argument(number), *_when(_EQUAL, _SIGKILL, _REFUSE)]
        for number in (1, 2)
    )
    return {
        "clone": [
            _argument(0),
            *_when(_ANY_BIT, ~_THREAD_FLAGS & 0xFFFFFFFF, _REFUSE),
            *_when(_ANY_BIT, _CLONE_THREAD, _ALLOW),
            refuse,
        ],
        "clone3": [(_RETURN, 0, 0, _ERRNO | errno.ENOSYS)],  # its flags are in memory, which a filter cannot read
        "fcntl": [_argument(1), *(part for command in _FCNTL for part in _when(_EQUAL, command, _ALLOW)), refuse],
        "ioctl": [(_RETURN, 0, 0, _ERRNO | errno.ENOTTY)],
        "kill": [*kill, allow],
        "tgkill": [*tgkill, allow],
        # A program may read its limits. If it lowered them, its death could look like the machine's fault.
        "prlimit64": [
            _argument(0),
            *_unless(_EQUAL, 0, _REFUSE),
            _argument(2),
            *_unless(_EQUAL, 0, _REFUSE),
            _upper_half(2),
            *_when(_EQUAL, 0, _ALLOW),
            refuse,
        ],
    }


def _argument(index: int) -> _Instruction:
    # The lower half: the kernel reads only this half of these arguments.
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * index)


def _upper_half(index: int) -> _Instruction:
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * index + 4)


def _when(operation: int, operand: int, verdict: int) -> list[_Instruction]:
    return [(operation, 0, 1, operand), (_RETURN, 0, 0, verdict)]


def _unless(operation: int, operand: int, verdict: int) -> list[_Instruction]:
    return [(operation, 1, 0, operand), (_RETURN, 0, 0, verdict)]


def _numbers(machine: Architecture, calls: dict[str, tuple[int | None, int | None]]) -> list[int]:
    return [number for numbers in calls.values() if (number := numbers[machine.column]) is not None]


class _Program(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def install(program: bytes) -> None:
    """Install the filter in this thread, and in all that it starts, for good. Raise ``OSError`` if refused."""
    held = _Program(len(program) // 8, program)
    no_new_privileges()
    prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(held))


def no_new_privileges() -> None:
    """Forbid this process to gain privileges; the kernel requires it of a process that confines itself without any."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def prctl(option: int, first: int, second: int = 0) -> None:
    """Call ``prctl``; raise ``OSError`` if the kernel refuses."""
    arguments = [ctypes.c_ulong(value) for value in (first, second, 0, 0)]
    if _libc.prctl(option, *arguments) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


_libc = ctypes.CDLL(None, use_errno=True)
