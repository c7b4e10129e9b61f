"""Who is to blame when a run breaks off: the program, unless the evidence is against the machine."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from plaudit_sandbox.sandbox import num_oom_kills

if TYPE_CHECKING:
    from conftest import Worker

CGROUPS = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({"proc/self/cgroup": "0::/\n", f"{CGROUPS}/memory.events": "low 0\noom 9\noom_kill 3\n"}, 3),
        ({"proc/self/cgroup": "0::/a/b\n", f"{CGROUPS}/a/b/memory.events": "oom 1\noom_kill 2\n"}, 2),
        ({"proc/self/cgroup": "4:memory:/x\n0::/\n", f"{CGROUPS}/memory/x/memory.oom_control": "oom_kill 5\n"}, 5),
        ({"proc/self/cgroup": "4:cpu,memory:/y\n", f"{CGROUPS}/memory/memory.oom_control": "oom_kill 1"}, 1),
        ({"proc/vmstat": "pgfault 7\noom_kill 4\n"}, 4),
        ({"proc/self/cgroup": "0::/\n"}, 0),
    ],
)
def test_kills_for_lack_of_memory_are_counted_where_the_kernel_counts_them(
    tmp_path: Path, files: dict[str, str], count: int
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert num_oom_kills(tmp_path) == count


def test_a_run_is_repeated_when_its_fork_server_dies_by_another_hand(worker: Worker) -> None:
    assert worker.score("print(1)", expected="1")["value"] == 1.0
    killed = threading.Timer(0.3, lambda: [os.kill(child, signal.SIGKILL) for child in children_of(worker.pid)])
    killed.start()
    score = worker.score("import time\ntime.sleep(1)\nprint(int(input()) + 1)", "1", "2")
    killed.join()
    assert (score["outcome"], score["value"]) == ("scored", 1.0)


def children_of(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children()]
