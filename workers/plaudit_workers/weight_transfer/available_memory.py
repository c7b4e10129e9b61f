"""Estimate the memory that this process can still take: the machine's, within the limits of its cgroups.

A process that exceeds the limit of a cgroup is killed, however much the machine has left. An anonymous file counts
towards the cgroup of the process that fills it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_CGROUPS = Path("sys/fs/cgroup")


class _Controller(NamedTuple):
    """Name the files of one version of cgroups. The cache of files is reclaimed before a process is killed."""

    limit: str
    usage: str
    cached: tuple[str, ...]


_V1 = _Controller("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_V2 = _Controller("memory.max", "memory.current", ("inactive_file", "active_file"))


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that this process can take without swapping and without reaching a limit."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    machine = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    limits = (_left(folder, controller) for folder, controller in _cgroups(root))
    return min([machine, *(left for left in limits if left is not None)])


def _cgroups(root: Path) -> Iterator[tuple[Path, _Controller]]:
    """Yield the folders of the process's cgroups that may limit its memory: its own and those around it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, controller = (root / _CGROUPS / "memory", _V1) if controllers else (root / _CGROUPS, _V2)
        own = Path(path.lstrip("/"))
        # In containers the path may be that of the host, and the mount the container's own cgroup.
        for folder in (own, *own.parents):
            yield mount / folder, controller


def _left(folder: Path, controller: _Controller) -> int | None:
    """Return the bytes left of a cgroup's limit; None if it has none."""
    try:
        limit = int((folder / controller.limit).read_text())
        used = int((folder / controller.usage).read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None  # no such folder, or no limit ("max")
    return max(0, limit - used + sum(int(counts.get(name, 0)) for name in controller.cached))
