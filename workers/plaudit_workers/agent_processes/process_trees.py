"""Read the process trees below the samples' processes from ``/proc``. Called in the template process."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Process(NamedTuple):
    """Describe a living process."""

    pid: int
    parent: int
    num_threads: int
    resident_bytes: int
    """Pages that it shares with others count in full."""


class ProcessTree(NamedTuple):
    """Hold a process and its descendants."""

    processes: list[Process]

    @property
    def num_threads(self) -> int:
        """Return the threads of all processes; a process has at least one."""
        return sum(process.num_threads for process in self.processes)

    def uses_more_than(self, memory_bytes: int) -> bool:
        """Return True if the processes together hold more memory; shared pages count once."""
        if sum(process.resident_bytes for process in self.processes) <= memory_bytes:
            return False
        return sum(_proportional_bytes(process.pid) for process in self.processes) > memory_bytes

    def kill(self) -> None:
        """Kill all of them, and the groups that they lead."""
        for process in self.processes:
            kill(process.pid)


def trees(roots: Collection[int]) -> dict[int, ProcessTree]:
    """Return the process tree of each living root."""
    by_pid = {process.pid: process for process in _living()}
    children: dict[int, list[int]] = defaultdict(list)
    for process in by_pid.values():
        children[process.parent].append(process.pid)
    return {root: ProcessTree(list(_below(root, by_pid, children))) for root in roots if root in by_pid}


def children_of_this_process() -> set[int]:
    """Return the ids of this process's children, including adopted and ended ones."""
    pid = os.getpid()
    try:
        return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        return {process.pid for process in _living() if process.parent == pid}


def kill(pid: int) -> None:
    """Kill a process, and its group where it leads one."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, signal.SIGKILL)


def _below(root: int, by_pid: dict[int, Process], children: dict[int, list[int]]) -> Iterator[Process]:
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        yield by_pid[pid]
        waiting += children[pid]


def _living() -> Iterator[Process]:
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            text = Path(f"/proc/{name}/stat").read_text(errors="replace")
        except OSError:
            continue  # it has ended
        # Behind the name, which may hold anything: state, parent, …; see proc_pid_stat(5), where state is field 3.
        fields = text.rpartition(")")[2].split()
        if fields[0] not in "ZX":
            yield Process(int(name), int(fields[1]), int(fields[17]), int(fields[21]) * _PAGE_BYTES)


def _proportional_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0  # it has ended
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
