"""Count what the kernel has killed for lack of memory: the only evidence on which a SIGKILL is the machine's fault."""

from __future__ import annotations

import re
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def num_oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes of this container were killed so far, or of this machine where that is unknown.

    Reads ``memory.events`` of cgroup v2, ``memory.oom_control`` of v1, else ``/proc/vmstat``.
    """
    for path in _files(root):
        try:
            found = _OOM_KILLS.search(path.read_text())
        except OSError:
            continue
        if found is not None:
            return int(found[1])
    return 0


def _files(root: Path) -> list[Path]:
    """Return the files that may have the count, the closest cgroup first."""
    base = root / _CGROUPS.relative_to("/")
    files: list[Path] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inner = path.lstrip("/")
        if controllers == "":
            files += [base / inner / "memory.events", base / "memory.events"]
        elif "memory" in controllers.split(","):
            folder = base / "memory"
            files += [folder / inner / "memory.oom_control", folder / "memory.oom_control"]
    return [*files, root / "proc/vmstat"]
