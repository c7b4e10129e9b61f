"""List the numbers of the system calls that a sandboxed Python program needs, by architecture.

From Linux's ``asm/unistd_64.h`` (x86_64) and ``asm-generic/unistd.h`` (aarch64), which never change. Calls that
the filter allows only with certain arguments are in ``CHECKED``; calls in no table are refused.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Architecture(NamedTuple):
    """The system call table of a processor."""

    audit: int
    """``AUDIT_ARCH_…`` of ``linux/audit.h``: which table of calls a process uses."""
    column: int
    """Position in the tables below."""
    last: int
    """Highest number when this was written; newer calls fail with "no such call"."""


ARCHITECTURES: Final = {
    "x86_64": Architecture(0xC000003E, 0, 462),
    "aarch64": Architecture(0xC00000B7, 1, 462),
}
"""By the name that ``platform.machine()`` returns."""

FIRST_X32: Final = 0x40000000
"""Where the x32 calls of x86_64 start, a second entry to the same kernel."""

ALLOWED: Final[dict[str, tuple[int | None, int | None]]] = {
    "read": (0, 63),
    "write": (1, 64),
    "futex": (202, 98),
    "mmap": (9, 222),
    "munmap": (11, 215),
    "brk": (12, 214),
    "lseek": (8, 62),
    "fstat": (5, 80),
    "close": (3, 57),
    "stat": (4, None),
    "newfstatat": (262, 79),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "close_range": (436, 436),
    "lstat": (6, None),
    "statx": (332, 291),
    "getdents64": (217, 61),
    "getcwd": (79, 17),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    "mremap": (25, 216),
    "mprotect": (10, 226),
    "madvise": (28, 233),
    "sched_yield": (24, 124),
    "set_robust_list": (273, 99),
    "rseq": (334, 293),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136),
    "rt_sigsuspend": (130, 133),
    "rt_sigtimedwait": (128, 137),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    "pause": (34, None),
    "alarm": (37, None),
    "setitimer": (38, 103),
    "getitimer": (36, 102),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "times": (100, 153),
    "getrusage": (98, 165),
    "sysinfo": (99, 179),
    "uname": (63, 160),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "gettid": (186, 178),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "getgroups": (115, 158),
    "getpgid": (121, 155),
    "getpgrp": (111, None),
    "getsid": (124, 156),
    "getrandom": (318, 278),
    "getrlimit": (97, 163),
    "getcpu": (309, 168),
    "sched_getaffinity": (204, 123),
}
"""Allowed with any arguments: they affect only the process itself and its open files."""

OPENING: Final[dict[str, tuple[int | None, int | None]]] = {"openat": (257, 56), "open": (2, None)}
"""Allowed where Landlock decides which files may be opened."""

CHECKED: Final[dict[str, tuple[int | None, int | None]]] = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "kill": (62, 129),
    "tgkill": (234, 131),
    "prlimit64": (302, 261),
}
"""Allowed with certain arguments only; see ``seccomp``."""
