"""Limits of one run of a program, and how the kernel enforces them."""

from __future__ import annotations

import math
import os
import resource
from pathlib import Path

import msgspec

_STACK_BYTES = 64 << 20
"""Stack of the main thread: deep recursion inside C code (comparisons, ``repr``) needs more than the usual 8 MiB."""
_OPEN_FILES = 32
_MOST_LIKELY_VICTIM = "1000"


class ProgramLimits(msgspec.Struct, frozen=True):
    """Limits of one run, that is, of one test case."""

    time_s: float = 10.0
    """Wall-clock seconds; a limit on CPU seconds is a little higher."""
    memory_bytes: int = 1 << 30
    """Memory that the program may map on top of what Python and the loaded modules have."""
    output_bytes: int = 16 << 20
    """The most that it may print, both streams together."""
    threads: int = 64
    """Concurrent threads."""


def limit_this_process(limits: ProgramLimits) -> None:
    """Set the limits that the kernel enforces, for good: hard and soft ones are the same.

    The number of processes is not among them: it counts all processes of a user on the machine, and root's not at all.
    """
    address_space = _mapped_bytes() + limits.memory_bytes
    cpu_s = math.ceil(limits.time_s) + 1
    for kind, value in (
        (resource.RLIMIT_AS, address_space),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_STACK, _STACK_BYTES),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        lowest = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (lowest, lowest))


def offer_to_the_oom_killer() -> None:
    """Make this process the first that the kernel kills when memory runs out."""
    try:
        Path("/proc/self/oom_score_adj").write_text(_MOST_LIKELY_VICTIM)
    except OSError:
        return  # a hardened /proc: the limit on memory still applies


def _mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
