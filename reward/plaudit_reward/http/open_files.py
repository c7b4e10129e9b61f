"""Raise the process's limit of open files, of which each connection needs one."""

from __future__ import annotations

import os
import resource

from plaudit_wire.errors import ConfigurationError

_SPARE = 256
"""For everything else that this process opens: logs, Redis, child processes and their pipes."""


def allow_connections(count: int) -> None:
    """Raise the soft limit of open files for ``count`` connections; ``ConfigurationError`` above the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd")) + count + _SPARE
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ConfigurationError(
            f"{count} connections need {needed} open files, and this process may open {hard}. Raise the hard limit "
            "(ulimit -Hn, LimitNOFILE, the container's ulimits) or lower reward.workers.maxConcurrentSamples"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else hard, hard))
