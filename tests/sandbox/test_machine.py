"""Commands in a machine: what they can do, keep and reach, and what ends with them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from namespaces import HAS_NAMESPACES
from plaudit_sandbox.machine import CommandEnd, Machine, MachineLimits, space_of
from plaudit_sandbox.machine_start import StartedCommand
from plaudit_wire.errors import DataError, InfrastructureError
from waiting import until

pytestmark = pytest.mark.skipif(not HAS_NAMESPACES, reason="this kernel makes no namespaces for us")
LIMITS = MachineLimits(
    memory_bytes=128 << 20, disk_bytes=24 << 20, processes=48, file_bytes=16 << 20, output_bytes=2000
)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    tmp_path.chmod(0o755)
    return Machine(tmp_path / "one", LIMITS)


def bash(machine: Machine, command: str, timeout_s: float = 60.0, **more: object) -> CommandEnd:
    return asyncio.run(machine.run(["bash", "-c", command], timeout_s=timeout_s, **more))  # type: ignore[arg-type]


def test_files_stay_and_processes_do_not(machine: Machine) -> None:
    first = bash(machine, "echo kept > /app/a; (sleep 300 &); nohup sleep 300 >/dev/null & echo started; exit 3")
    assert (first.ending, first.exit_code, first.output) == ("exited", 3, "started\n")
    second = bash(machine, "cat a; ls /proc | grep -c '^[0-9]'; whoami; pwd")
    kept, num_processes, user, folder = second.output.split()
    assert (kept, user, folder) == ("kept", "root", "/app")
    assert int(num_processes) <= 5


def test_another_object_goes_on_with_the_same_folder(machine: Machine) -> None:
    bash(machine, "echo kept > /root/a")
    assert bash(Machine(machine.folder, LIMITS), "cat /root/a").output == "kept\n"
    machine.remove()
    assert not machine.folder.exists()


@pytest.mark.parametrize(
    "command",
    [
        "touch /usr/bin/new",
        "rm /bin",
        "mkdir /new",
        "echo /tmp/evil.so > /etc/ld.so.preload",
        "mount -t tmpfs none /tmp",
        "mount --bind /tmp /app",
        "unshare --user true",
        "unshare --mount true",
        "mknod /tmp/disk b 254 0",
        "chroot /tmp true",
        "kill -9 1 && sleep 0.2 && ! kill -0 1",
        "echo 1 > /proc/sys/kernel/core_pattern",
        "echo b > /proc/sysrq-trigger",
        "exec 3<>/dev/tcp/127.0.0.1/22",
        "cat /proc/1/environ | tr '\\0' '\\n' | grep -v ^PATH=",
        "ls -d /work /host /old/* /home/*",
        "head -c 20000000 /dev/zero > /tmp/large",
    ],
)
def test_what_a_machine_must_not_do_fails(machine: Machine, command: str) -> None:
    assert bash(machine, command).exit_code != 0


def test_nothing_of_the_host_s_environment_or_folders_is_seen(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "of the host")
    (machine.folder.parent / "two").mkdir()
    (machine.folder.parent / "two" / "of-a-neighbour").write_text("")
    seen = bash(machine, "env; cat /proc/[0-9]*/environ; find / -name of-a-neighbour 2>/dev/null")
    assert "of the host" not in seen.output
    assert "neighbour" not in seen.output
    assert {line.partition("=")[0] for line in bash(machine, "env").output.splitlines()} <= {
        "HOME", "LANG", "TERM", "PATH", "PWD", "SHLVL", "_",
    }  # fmt: skip


def test_a_machine_stops_at_its_limits(machine: Machine) -> None:
    memory = bash(machine, 'python3 -c "x = bytearray(256 << 20); import time; time.sleep(60)"')
    disk = bash(machine, "for i in 1 2 3 4; do head -c 8000000 /dev/zero > /var/$i; done; sleep 60")
    bash(machine, "rm -f /var/[0-9]")
    time = bash(machine, "sleep 60", timeout_s=0.5)
    bomb = bash(machine, "exec sh -c 'for i in $(seq 99); do sleep 60 & done'")
    assert (memory.ending, disk.ending, time.ending) == ("memory", "disk", "timeout")
    assert memory.exit_code == disk.exit_code == time.exit_code == 124
    assert "Cannot fork" in bomb.output
    assert bash(machine, "echo alive").output == "alive\n"


TAKE_ALL = """
import ctypes, time
taken, libc = 0, ctypes.CDLL(None)
while libc.inotify_init() >= 0: taken += 1
open("/app/taken", "w").write(str(taken))
time.sleep(600)
"""


async def test_what_the_kernel_counts_for_each_user_is_shared_out(machine: Machine) -> None:
    other = Machine(machine.folder.with_name("two"), machine.limits)
    taking = asyncio.create_task(machine.run(["python3", "-c", TAKE_ALL], timeout_s=60.0))
    await until(lambda: (machine.folder / "files/app/taken").exists())
    code = "import ctypes; print(ctypes.CDLL(None).inotify_init() >= 0)"
    assert (await other.run(["python3", "-c", code], timeout_s=60.0)).output == "True\n"
    taking.cancel()
    await asyncio.wait([taking])


HOLD = """
import os, socket, time
kept = []
def memfd(): kept.append(os.memfd_create("x")); os.write(kept[-1], b"x" * (8 << 20))
def mapped():
    import mmap
    memfd(); kept.append(mmap.mmap(kept[-1], 8 << 20)); os.close(kept.pop(-2))
def removed():
    kept.append(os.open("/app/x", os.O_RDWR | os.O_CREAT)); os.unlink("/app/x"); os.write(kept[-1], b"x" * (8 << 20))
def sockets(): kept.extend(each for _ in range(40) for each in socket.socketpair())
def deep():
    for _ in range(10): os.mkdir("d" * 250); os.chdir("d" * 250)
    open("x", "wb").write(b"x" * (8 << 20))
for _ in range(30): WHAT()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("what", "limit"),
    [("memfd", "memory"), ("mapped", "memory"), ("removed", "disk"), ("sockets", "memory"), ("deep", "disk")],
)
def test_what_has_no_name_or_no_path_counts_as_well(machine: Machine, what: str, limit: str) -> None:
    if what == "mapped" and os.geteuid() != 0:
        pytest.skip("only root may see what is mapped")
    held = asyncio.run(machine.run(["python3", "-c", HOLD.replace("WHAT", what)], timeout_s=30.0))
    assert held.ending == limit
    machine.remove()
    assert not machine.folder.exists()


def test_a_command_that_cannot_be_started_is_refused(machine: Machine) -> None:
    for command in (["true", "a\0b"], ["true", "x" * 200_000]):
        with pytest.raises(DataError, match="128 KiB"):
            asyncio.run(machine.run(command, timeout_s=10.0))


def test_a_long_output_keeps_its_beginning_and_its_end(machine: Machine) -> None:
    output = bash(machine, "echo first; yes | head -c 3000000; echo last").output
    assert output.startswith("first\ny\n")
    assert output.endswith("y\nlast\n")
    assert "bytes cut ...]" in output
    assert len(output) < 2 * LIMITS.output_bytes


async def test_a_command_that_writes_without_end_keeps_nobody_from_their_turn() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    beside = asyncio.create_task(others())
    ours, theirs = socket.socketpair()
    with ours, theirs, os.fdopen(os.open("/dev/zero", os.O_RDONLY), "rb", 0) as output:
        command = StartedCommand(ours, output)
        for _ in range(100):
            assert await command.read(9) == bytes(9)
    beside.cancel()
    assert turns >= 99


async def test_a_machine_is_counted_beside_the_event_loop(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []

    def noted(folder: Path, most: int) -> int:
        counted.append(threading.current_thread() is threading.main_thread())
        return space_of(folder, most)

    monkeypatch.setattr("plaudit_sandbox.machine.space_of", noted)
    await machine.run(["sleep", "0.6"], timeout_s=60.0)
    assert set(counted) == {False}


async def test_a_time_limit_waits_for_no_count(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    ended = []

    def slow(folder: Path, most: int) -> int:
        may_end.wait(60.0)
        ended.append(folder)
        return 0

    monkeypatch.setattr("plaudit_sandbox.machine.space_of", slow)
    stopped = await machine.run(["sleep", "100"], timeout_s=1.0)
    assert (stopped.ending, ended) == ("timeout", [])
    may_end.set()


def test_a_machine_with_more_files_than_anybody_counts_is_full(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plaudit_sandbox.machine.MOST_ENTRIES", 1000)
    assert bash(machine, "touch $(seq 900)").ending == "exited"
    assert bash(machine, "mkdir d; cd d; touch $(seq 900)").ending == "disk"


def test_further_folders_of_the_host_can_be_read_only(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "answer").write_text("42")
    machine = Machine(tmp_path / "one", LIMITS, readable=[tools])
    top = tools.parts[1]
    bash(Machine(machine.folder, LIMITS), f"rm -rf /{top}/*; ln -s /etc /{top}/{tools.parts[2]}")
    assert bash(machine, f"cat {tools}/answer").output == "42"
    assert bash(machine, f"echo 43 > {tools}/answer").exit_code != 0


def test_a_command_reads_what_it_is_given(machine: Machine) -> None:
    read = asyncio.run(machine.run(["cat"], timeout_s=60.0, stdin=b"given", directory="/nowhere"))
    assert read.output == "given"


@pytest.mark.long
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_many_commands_at_once_get_their_own_input_and_output(tmp_path: Path, run: Callable[..., Any]) -> None:
    tmp_path.chmod(0o755)

    async def echoed(number: int) -> str:
        machine = Machine(tmp_path / str(number % 4), LIMITS)
        ended = await machine.run(["cat"], timeout_s=60.0, stdin=b"%d" % number)
        late = machine.run(["sleep", "100"], timeout_s=0.01)
        stopped, _ = await asyncio.gather(late, asyncio.to_thread(subprocess.run, ["cat"], input=b"", check=True))
        return ended.output if stopped.ending == "timeout" else stopped.ending

    async def all_echoed() -> list[str]:
        return await asyncio.gather(*map(echoed, range(24)))

    opened = []
    for _ in range(2):  # in the first round the event loop and the starter open what they keep
        assert run(all_echoed()) == [str(number) for number in range(24)]
        opened.append(len(os.listdir("/proc/self/fd")))
    assert opened[1] <= opened[0] + 2


async def test_another_process_starts_commands_when_the_one_that_did_is_killed(machine: Machine) -> None:
    assert (await machine.run(["true"], timeout_s=60.0)).exit_code == 0
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    (starter,) = [each for each in children if "machine_process" in Path(f"/proc/{each}/cmdline").read_text()]
    running = asyncio.create_task(machine.run(["bash", "-c", "touch begun; sleep 876543"], timeout_s=60.0))
    await until(lambda: (machine.folder / "files/app/begun").exists())
    os.kill(int(starter), signal.SIGKILL)
    with pytest.raises(InfrastructureError, match="ended from outside"):
        await running
    await until(lambda: not _running("876543"))  # the kernel ends it with its parent, a moment later
    assert (await machine.run(["echo", "again"], timeout_s=60.0)).output == "again\n"


RUNS_FOREVER = """
import asyncio, sys
from pathlib import Path
from plaudit_sandbox.machine import Machine
asyncio.run(Machine(Path(sys.argv[1])).run(["bash", "-c", "touch /app/begun; sleep 987654"], timeout_s=1e6))
"""


async def test_a_machine_ends_with_the_process_that_runs_it(machine: Machine) -> None:
    process = await asyncio.to_thread(subprocess.Popen, [sys.executable, "-c", RUNS_FOREVER, str(machine.folder)])
    await until(lambda: (machine.folder / "files/app/begun").exists())
    process.send_signal(signal.SIGKILL)
    process.wait()
    await until(lambda: not _running("987654"))


def _running(argument: str) -> bool:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if argument in (folder / "cmdline").read_text().split("\0"):
                return os.path.exists(folder)
        except OSError:
            continue
    return False
