"""Memory for received weights: what the machine has, within the limits of the process's cgroups."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from plaudit_workers.weights.receive import available_bytes

CGROUPS = "sys/fs/cgroup"
MEMINFO = {"proc/meminfo": "MemTotal: 2000 kB\nMemAvailable: 1000 kB\n"}
KB = 1024


def v1(folder: str, limit: int, used: int, cached: int = 0) -> dict[str, str]:
    folder = f"{CGROUPS}/memory/{folder}"
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit * KB}\n",
        f"{folder}/memory.usage_in_bytes": f"{used * KB}\n",
        f"{folder}/memory.stat": f"inactive_file 7\ntotal_inactive_file {cached * KB}\ntotal_active_file {KB}\n",
    }


def v2(folder: str, limit: int | str, used: int, cached: int = 0) -> dict[str, str]:
    folder = f"{CGROUPS}/{folder}"
    return {
        f"{folder}/memory.max": f"{limit * KB if isinstance(limit, int) else limit}\n",
        f"{folder}/memory.current": f"{used * KB}\n",
        f"{folder}/memory.stat": f"anon 5\ninactive_file {cached * KB}\nactive_file {KB}\n",
    }


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, 1000),
        ({"proc/self/cgroup": "0::/\n", **v2("", 300, 100)}, 201),
        ({"proc/self/cgroup": "0::/\n", **v2("", 300, 300, cached=50)}, 51),
        ({"proc/self/cgroup": "0::/\n", **v2("", "max", 300)}, 1000),
        ({"proc/self/cgroup": "0::/pod/own\n", **v2("pod/own", "max", 9), **v2("pod", 300, 200)}, 101),
        ({"proc/self/cgroup": "0::/own\n", **v2("own", 100, 200)}, 0),
        ({"proc/self/cgroup": "4:memory:/x\n0::/\n", **v1("x", 300, 100, cached=20)}, 221),
        ({"proc/self/cgroup": "5:cpu,memory:/of/the/host\n", **v1("", 300, 100)}, 201),
        ({"proc/self/cgroup": "5:cpu:/\n4:memory:/\n", **v1("", 9007199254740991, 100)}, 1000),
    ],
)
def test_the_least_of_the_machines_memory_and_what_each_cgroup_leaves_is_available(
    tmp_path: Path, files: dict[str, str], available: int
) -> None:
    for name, text in (MEMINFO | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_bytes(tmp_path) == available * KB


RECEIVING = """
import os, sys
from plaudit_wire.messages import PolicyVersion, Transfer, TransferPart
from plaudit_workers.weights.send import TransferError
from plaudit_workers.weights.send import WeightPart, WeightServer
from plaudit_workers.weights.receive import Reception
part, server = WeightPart.of([(0, memoryview(bytes(200 << 20)))]), WeightServer()
server.offer(PolicyVersion(1, 0), "token", part)
open(sys.argv[1], "w").write(str(os.getpid()))  # what it has already does not count
transfer = Transfer("token", 200 << 20, [TransferPart(f"127.0.0.1:{server.port}", part.digest)])
try:
    with Reception(PolicyVersion(1, 0), transfer) as reception:
        reception.receive()
except TransferError as error:
    print(error)
"""


def test_weights_that_exceed_the_limit_of_a_cgroup_are_refused_and_no_process_is_killed() -> None:
    mounts = [Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")]
    own = (
        next((each for each in mounts if (each / "cgroup.procs").exists()), mounts[0]) / f"test-{secrets.token_hex(4)}"
    )
    try:
        own.mkdir()
    except OSError:
        pytest.skip("this process may not create a cgroup")
    try:
        limit = next((path for name in ("memory.limit_in_bytes", "memory.max") if (path := own / name).exists()), None)
        if limit is None:
            pytest.skip("this process may not limit the memory of a cgroup")
        limit.write_text(str(100 << 20))
        command = [sys.executable, "-c", RECEIVING, str(own / "cgroup.procs")]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        own.rmdir()
    assert ended.returncode == os.EX_OK, ended.stderr
    assert "the weights have 209,715,200 bytes" in ended.stdout
