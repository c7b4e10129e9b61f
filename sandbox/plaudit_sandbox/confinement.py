"""Take from this process, for good, what a program in it could use against others. Needs no privilege.

Files
    By Landlock. A ruleset is made once, by a process that can open the folders; every program restricts itself with it,
    so that each has a domain of its own, from which no process outside can be traced or (ABI 6) signalled. Structures
    and rights are those of ``linux/landlock.h``; a kernel is asked only for what its ABI knows.
System calls
    By a seccomp filter that denies by default. A program cannot start a process (``clone`` only with ``CLONE_THREAD``)
    or exec one, open a socket, or signal, trace, limit or pin another process; it has no io_uring, namespace, mount,
    key, bpf or perf. The instructions are those of ``linux/bpf_common.h``, the data they read is
    ``struct seccomp_data`` (``linux/seccomp.h``). A filter cannot be removed.
Privileges
    All of them, and the inspection by debuggers.

The numbers of the calls are from Linux's ``asm/unistd_64.h`` (x86_64) and ``asm-generic/unistd.h`` (aarch64), which
never change. Calls in no table are refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import re
import stat
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from plaudit_sandbox.privileges import forgo_capabilities, no_new_privileges, prctl
from plaudit_wire.errors import ConfigurationError

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION = 1
_PATH_BENEATH = 1
_WRITE_FILE, _READ_FILE, _READ_FOLDER = 1 << 1, 1 << 2, 1 << 3
_MAKE_BLOCK, _REFER, _TRUNCATE = 1 << 11, 1 << 13, 1 << 14
_CHANGING = 0x7FFF & ~(1 | _READ_FOLDER)
"""Reading, writing, making, moving and removing files; not executing (1) and listing."""
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
    """Make a ruleset that allows to read these files and folders, and nothing else; return its file descriptor.

    Leaves out those that this process may not open. Raises ``OSError`` if this kernel has no Landlock.
    """
    version = abi()
    rights = (1 << _NUM_FILE_RIGHTS[min(version, 5)]) - 1 if version else 0
    network, scopes = [_NETWORK_RIGHTS] * (version >= 4), [_SCOPES] * (version >= _SCOPES_SINCE)
    ruleset = _ruleset(rights, *network, *scopes)
    for path in readable:
        _allow(ruleset, path.resolve(), _READ_FILE | _READ_FOLDER, _READ_FILE)
    return ruleset


def keep_apart(*, hides: bool = False) -> bool:
    """Begin a domain of its own for this thread and all that it starts; ``no_new_privs`` must be set.

    No process outside can be traced, its memory and environment cannot be read, and (ABI 6) it cannot be signalled.
    Files and network stay as they are, except that nothing can be mounted before ABI 6 and no file moved to another
    folder before ABI 2. Returns False where this kernel has no Landlock.

    Args:
        hides: ``hide_neighbours`` follows. Once any domain of a process handles files, one that says nothing about
            moving them to other folders forbids it.
    """
    version = abi()
    if not version:
        return False
    forgo_capabilities()
    has_scopes = version >= _SCOPES_SINCE
    # A domain handles something: without scopes these, which are then allowed everywhere.
    handled = _MAKE_BLOCK | (_REFER if version >= 2 else 0) if hides or not has_scopes else 0
    ruleset = _ruleset(handled, *(0, _SIGNALS) * has_scopes)
    _allow(ruleset, Path("/"), handled, 0)
    _restrict_by(ruleset)
    return True


def hide_neighbours(own: Path, hidden: Iterable[Path] = ()) -> bool:
    """Take from this thread, and all that it starts, the files in the folders beside ``own`` and in ``hidden``.

    Landlock knows only what is allowed: everything that exists but these. So in the folders above them nothing new can
    be made. Listing and executing stay allowed everywhere; nothing can be mounted. Returns False where there is no
    Landlock.
    """
    version = abi()
    if not version:
        return False
    known = (1 << _NUM_FILE_RIGHTS[min(version, 5)]) - 1
    handled, of_file = _CHANGING & known, (_READ_FILE | _WRITE_FILE | _TRUNCATE) & known
    ruleset = _ruleset(handled)
    own = own.resolve()
    _allow(ruleset, own, handled, of_file)
    refused = {own.parent, *(path.resolve() for path in hidden)}
    on_the_way = {folder for path in refused for folder in path.parents} - refused
    for folder in on_the_way:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                path = Path(entry.path)
                if path not in refused and path not in on_the_way:
                    with contextlib.suppress(OSError):  # of a file system without rules: it stays refused
                        _allow(ruleset, path, handled, of_file)
    _restrict_by(ruleset)
    return True


def _ruleset(*parts: int) -> int:
    """Make a ruleset of rights on files, on the network, and of scopes; a kernel takes as many as it knows."""
    attributes = struct.pack(f"={len(parts)}Q", *parts)
    return _call(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))


def _restrict_by(ruleset: int) -> None:
    try:
        restrict(ruleset)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: Path, of_folder: int, of_file: int) -> None:
    """Allow these rights on a path and below it; leave out one that this process may not open, and links."""
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        mode = os.fstat(opened).st_mode
        if rights := 0 if stat.S_ISLNK(mode) else of_folder if stat.S_ISDIR(mode) else of_file:
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


class Architecture(NamedTuple):
    """Describe the system call table of a processor."""

    audit: int
    """``AUDIT_ARCH_…`` of ``linux/audit.h``: which table of calls a process uses."""
    column: int
    """Position in the tables below."""
    last: int
    """Highest number when this was written; newer calls fail with "no such call"."""


ARCHITECTURES: Final = {"x86_64": Architecture(0xC000003E, 0, 462), "aarch64": Architecture(0xC00000B7, 1, 462)}
"""By the name that ``platform.machine()`` returns."""
FIRST_X32: Final = 0x40000000
"""Where the x32 calls of x86_64 start, a second entry to the same kernel."""
Calls = dict[str, tuple[int, int | None]]
"""System calls by name: numbers on x86_64 and on aarch64, which lacks some."""


def _calls(table: str) -> Calls:
    found = re.findall(r"(\w+) (\d+) (\d+|-)", table)
    return {name: (int(first), None if second == "-" else int(second)) for name, first, second in found}


ALLOWED: Final = _calls("""
    read 0 63                  write 1 64                 futex 202 98               mmap 9 222
    munmap 11 215              brk 12 214                 lseek 8 62                 fstat 5 80
    close 3 57                 stat 4 -                   newfstatat 262 79          readv 19 65
    writev 20 66               pread64 17 67              pwrite64 18 68             close_range 436 436
    lstat 6 -                  statx 332 291              getdents64 217 61          getcwd 79 17
    dup 32 23                  dup2 33 -                  dup3 292 24                pipe 22 -
    pipe2 293 59               poll 7 -                   ppoll 271 73               select 23 -
    pselect6 270 72            mremap 25 216              mprotect 10 226            madvise 28 233
    sched_yield 24 124         set_robust_list 273 99     rseq 334 293               exit 60 93
    exit_group 231 94          rt_sigaction 13 134        rt_sigprocmask 14 135      rt_sigreturn 15 139
    rt_sigpending 127 136      rt_sigsuspend 130 133      rt_sigtimedwait 128 137    sigaltstack 131 132
    restart_syscall 219 128    pause 34 -                 alarm 37 -                 setitimer 38 103
    getitimer 36 102           nanosleep 35 101           clock_nanosleep 230 115    clock_gettime 228 113
    clock_getres 229 114       gettimeofday 96 169        time 201 -                 times 100 153
    getrusage 98 165           sysinfo 99 179             uname 63 160               getpid 39 172
    getppid 110 173            gettid 186 178             getuid 102 174             geteuid 107 175
    getgid 104 176             getegid 108 177            getresuid 118 148          getresgid 120 150
    getgroups 115 158          getpgid 121 155            getpgrp 111 -              getsid 124 156
    getrandom 318 278          getrlimit 97 163           getcpu 309 168             sched_getaffinity 204 123
""")
"""Allowed with any arguments: they affect only the process itself and its open files."""
OPENING: Final = _calls("openat 257 56  open 2 -")
"""Allowed where Landlock decides which files may be opened."""
CHECKED: Final = _calls("""
    clone 56 220    clone3 435 435    fcntl 72 25    ioctl 16 29    kill 62 129    tgkill 234 131    prlimit64 302 261
""")
"""Allowed with certain arguments only; see ``_checks``."""
_LOAD, _EQUAL, _GREATER_EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in ``seccomp_data``; each argument has eight bytes, the lower half first."""
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_REFUSE = _ERRNO | errno.EPERM
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
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

    ``opens``: files may be opened; Landlock then decides which.
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
            (_LOAD, 0, 0, _ARGUMENTS + 8 * 2 + 4),  # the upper half
            *_when(_EQUAL, 0, _ALLOW),
            refuse,
        ],
    }


def _argument(index: int) -> _Instruction:
    # The lower half: the kernel reads only this half of these arguments.
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * index)


def _when(operation: int, operand: int, verdict: int) -> list[_Instruction]:
    return [(operation, 0, 1, operand), (_RETURN, 0, 0, verdict)]


def _unless(operation: int, operand: int, verdict: int) -> list[_Instruction]:
    return [(operation, 1, 0, operand), (_RETURN, 0, 0, verdict)]


def _numbers(machine: Architecture, calls: Calls) -> list[int]:
    return [number for numbers in calls.values() if (number := numbers[machine.column]) is not None]


class _Program(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def install(program: bytes) -> None:
    """Install the filter in this thread, and in all that it starts, for good. Raise ``OSError`` if refused."""
    held = _Program(len(program) // 8, program)
    no_new_privileges()
    prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(held))
