"""Confine the process of a sample, so that what its tools do wrong costs this sample only. Called in the fork.

A tool may run what the policy wrote. The kernel keeps its signals away from all other processes (Landlock, since Linux
6.12), refuses it memory beyond a limit, and ends it first when memory runs out. What it starts stays below it in the
process tree, where ``process_trees`` finds and kills it.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from plaudit_reward.code.sandbox.confinement.landlock import keep_signals_inside
from plaudit_reward.code.sandbox.confinement.seccomp import no_new_privileges, prctl
from plaudit_reward.code.sandbox.limits import offer_to_the_oom_killer

_PR_SET_CHILD_SUBREAPER = 36
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def confine(memory_bytes: int) -> None:
    """Confine this process and all that it starts, for good. Each may allocate ``memory_bytes`` on top of what it has.

    Raises:
        OSError: the kernel refuses.
    """
    adopt_orphans()
    no_new_privileges()
    keep_signals_inside()
    offer_to_the_oom_killer()
    _lower(resource.RLIMIT_DATA, _data_bytes() + memory_bytes)
    _lower(resource.RLIMIT_CORE, 0)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parents end, so that none leaves the process tree.

    Raises:
        OSError: the kernel refuses.
    """
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def machine_memory_bytes() -> int:
    """Return the memory of this container, or of the machine where no container limits it."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _CGROUP_LIMITS:
        try:
            sizes.append(int(Path(path).read_text()))
        except (OSError, ValueError):
            continue  # another version of cgroups, or no limit ("max")
    return min(sizes)


def _lower(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    lowest = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (lowest, lowest))


def _data_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    return pages * os.sysconf("SC_PAGE_SIZE")
