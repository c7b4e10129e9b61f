"""The connection to a sample's process: its last message counts, whichever of its two ends is noticed first."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from plaudit_sandbox.confinement import abi
from plaudit_wire.frames import frame
from plaudit_workers.agents.messages import AgentFailed, FromSample
from plaudit_workers.agents.processes import SampleProcess

LAST = AgentFailed("no luck")


class Connected:
    """A process, its end of the connection, and everything that was read from it."""

    def __init__(self, process: SampleProcess, theirs: socket.socket) -> None:
        self.process = process
        self.theirs = theirs
        self.read: list[FromSample] = []
        process.on_message = self._take

    def _take(self, message: FromSample) -> bool:
        self.read.append(message)
        return True


@pytest.fixture
async def connected() -> AsyncIterator[Connected]:
    ours, theirs = socket.socketpair()
    process = SampleProcess(0, lambda _: None)
    await asyncio.get_running_loop().create_connection(lambda: process, sock=ours)
    yield Connected(process, theirs)
    theirs.close()
    process.close()


@pytest.mark.parametrize("size", [1, 100_000], ids=["one read", "many reads"])
async def test_the_last_message_is_read_when_the_exit_is_noticed_first(connected, size) -> None:
    messages = [AgentFailed("x" * size), LAST]
    connected.theirs.sendall(frame(messages))
    connected.theirs.close()
    connected.process.exited("ended with exit code 0")  # the loop has not read the connection yet
    assert await connected.process.died == "ended with exit code 0"
    assert connected.read == messages


async def test_the_exit_is_the_reason_when_the_connection_closed_first(connected) -> None:
    connected.theirs.sendall(frame([LAST]))
    connected.theirs.close()
    while not connected.read:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.01)
    connected.process.exited("was killed by SIGSEGV")
    assert await connected.process.died == "was killed by SIGSEGV"


async def test_a_connection_that_another_process_holds_open_delays_the_end_only(connected) -> None:
    connected.theirs.sendall(frame([LAST]))
    connected.process.exited("ended with exit code 3")
    assert await connected.process.died == "ended with exit code 3"
    assert connected.read == [LAST]


async def test_a_killed_process_ends_at_once(connected) -> None:
    connected.process.exited("ended with exit code 0")
    connected.process.kill("was killed: no result within 1 s")
    assert connected.process.died.result() == "was killed: no result within 1 s"


def test_a_template_imports_only_what_its_sources_need():
    heavy = "{'aiohttp', 'numpy', 'pydantic', 'transformers'}"
    program = f"import sys, plaudit_workers.agents.template; print({heavy} & sys.modules.keys())"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "set()\n"


SIBLINGS = """
import os, sys
from pathlib import Path
from plaudit_sandbox import confinement
from plaudit_workers.agents.template import _confine

if int(sys.argv[1]):
    confinement.abi = lambda: int(sys.argv[1])
ready, go = os.pipe(), os.pipe()
first = os.fork()
if first == 0:
    _confine(1 << 30, hides=False)
    os.write(ready[1], b"1")
    os.read(go[0], 1)
    os._exit(0)
os.read(ready[0], 1)
second = os.fork()
if second == 0:
    _confine(1 << 30, hides=False)
    for name in ("environ", "mem", "maps"):
        try:
            open(f"/proc/{first}/{name}", "rb").close()
            print(name)
        except PermissionError:
            pass
    Path("a").write_text("abc")
    Path("folder").mkdir()
    os.rename("a", "folder/a") if int(sys.argv[1]) != 1 else os.rename("a", "b")
    sys.stdout.flush()
    os._exit(0)
ended = os.waitpid(second, 0)[1]
os.write(go[1], b"1")
sys.exit(ended)
"""


@pytest.mark.skipif(not abi(), reason="this kernel has no Landlock")
@pytest.mark.parametrize("version", [0, 1, 3, 5])
def test_no_process_of_a_sample_sees_into_another_samples_whatever_the_kernel_knows(tmp_path, version) -> None:
    """0: what this kernel knows. The tests run as root, whom only the loss of capabilities keeps out."""
    command = [sys.executable, "-c", SIBLINGS, str(version)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
