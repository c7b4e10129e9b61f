"""Read the CPU time of another process and of one of its threads (Linux ``/proc``)."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def process_cpu_s(pid: int) -> float:
    """Return the CPU seconds that the process has used so far; 0 when it has ended."""
    return _cpu_s(Path(f"/proc/{pid}/stat"))


def thread_cpu_s(pid: int, thread: int) -> float:
    """Return the CPU seconds that one of its threads has used so far; 0 when it has ended."""
    return _cpu_s(Path(f"/proc/{pid}/task/{thread}/stat"))


def _cpu_s(stat: Path) -> float:
    try:
        # The name in the second field may contain spaces and parentheses; fields after the last one are regular.
        fields = stat.read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
