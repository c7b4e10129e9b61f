"""Run programs in a reward worker's local sandbox, and return how they ended.

It has a few fork servers (``server``), each with one program at a time. A fork server that dies is replaced, and its
run repeated; other runs are not affected. Their messages, the limits of a run and the imports that verl puts before
every program are defined here too.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import resource
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from plaudit_sandbox.lifetime import inherited_by_python, reap, start_module
from plaudit_sandbox.privileges import limit_for_good
from plaudit_wire.errors import ConfigurationError, DataError, InfrastructureError, WorkerKilledError
from plaudit_wire.frames import frame

_CGROUPS = Path("/sys/fs/cgroup")
_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def num_oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes of this container the kernel has killed for lack of memory, or else of this machine.

    It is the only evidence on which a SIGKILL is the machine's fault. Reads ``memory.events`` of cgroup v2,
    ``memory.oom_control`` of v1, else ``/proc/vmstat``.
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


_STACK_BYTES = 64 << 20
"""Stack of the main thread: deep recursion inside C code (comparisons, ``repr``) needs more than the usual 8 MiB."""
_OPEN_FILES = 32
_MOST_LIKELY_VICTIM = "1000"


class ProgramLimits(msgspec.Struct, frozen=True):
    """Limit one run, that is, one test case."""

    time_s: float = 10.0
    """Seconds in which the program runs or waits by itself. While it waits for a processor that others use, no time
    passes; a limit on CPU seconds is a little higher."""
    memory_bytes: int = 1 << 30
    """Memory that the program may map on top of what Python and the loaded modules have."""
    output_bytes: int = 16 << 20
    """The most that it may print, both streams together."""
    threads: int = 64
    """Concurrent threads."""


def limit_this_process(limits: ProgramLimits) -> None:
    """Set the limits that the kernel enforces, for good.

    The number of processes is not among them: it counts all processes of a user on the machine, and root's not at all.
    """
    mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    for kind, value in (
        (resource.RLIMIT_AS, mapped_bytes + limits.memory_bytes),
        (resource.RLIMIT_CPU, math.ceil(limits.time_s) + 1),
        (resource.RLIMIT_STACK, _STACK_BYTES),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        limit_for_good(kind, value)


def offer_to_the_oom_killer() -> None:
    """Make this process the first that the kernel kills when memory runs out."""
    with contextlib.suppress(OSError):  # a hardened /proc: the limit on memory still applies
        Path("/proc/self/oom_score_adj").write_text(_MOST_LIKELY_VICTIM)


Ending = Literal[
    "finished",
    "raised",
    "exited",
    "crashed",
    "time limit",
    "memory limit",
    "output limit",
    "thread limit",
    "killed",
    "unprepared",
]
"""The end of a run. ``exited``: with an exit code other than 0. ``crashed``: by a signal. ``killed``: by the kernel for
lack of memory, which its cgroup's counter proves, or before the program began. ``unprepared``: the test case's input
cannot be read, and the program has not begun. Only the last two are no fault of the program."""


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Prepare to run programs. The first message of the sandbox; the answer is ``Ready`` or ``Unable``."""

    allow_without_landlock: bool = False


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Report that programs can be run. From the fork server."""

    unreadable: list[str] = []
    """Folders of Python's modules that the user of the programs may not read: an import from there fails."""


class Unable(msgspec.Struct, frozen=True, tag=True):
    """Report that programs cannot be confined here; ``message`` has the reason and the remedy. From the fork server."""

    message: str


class RunProgram(msgspec.Struct, frozen=True, tag=True):
    """Run a program once. From the sandbox."""

    source: str
    """The program's text."""
    stdin: str = ""
    """Its standard input; the arguments of a function, one JSON text a line."""
    function: str | None = None
    """Call this function (or method of a class ``Solution``) instead of running the text as a program."""
    as_script: bool = False
    """Run the text as ``python program.py`` does, not as verl does; see ``program``."""
    part: Literal["program", "calls", "evaluation"] = "program"
    """Perform an assert's calls of the program, or evaluate an assert, instead; see ``plaudit_reward.code.asserts``."""
    payload: str = ""
    """Input of that part."""
    limits: ProgramLimits = ProgramLimits()


class Ran(msgspec.Struct, frozen=True, tag=True):
    """Report the end of a run. From the fork server."""

    ending: Ending
    stdout: bytes = b""
    """Its output; the result of a function as ``encode_result`` writes it."""
    reason: str = ""
    """The last line of standard error, when it did not finish."""
    wall_s: float = 0.0
    waited_s: float = 0.0
    """Part of ``wall_s`` in which it could have run, but others had the processors."""
    cpu_s: float = 0.0
    peak_bytes: int = 0
    """The most memory that it used at a time."""


FromServer = Ready | Unable | Ran
ToServer = Prepare | RunProgram
_START_WITHIN_S = 60.0
_ANSWER_WITHIN_S = 30.0
"""After the longest that a program may take; a fork server that is later than this hangs."""
LONGEST_WAIT_FACTOR = 10.0
"""A program that gets less than this share of a processor is ended after that many of its time limits; nobody can say
then what it would have scored."""
_LOOK_EVERY_S = 0.005
_decoder = msgspec.msgpack.Decoder(list[FromServer])


class Sandbox:
    """Run programs, with ``allow_without_landlock`` also where the kernel has no Landlock; open it before use."""

    def __init__(self, processes: int, *, allow_without_landlock: bool = False) -> None:
        self._prepare = Prepare(allow_without_landlock)
        self._servers = [_ForkServer(self._prepare) for _ in range(processes)]
        self._free: asyncio.LifoQueue[_ForkServer] = asyncio.LifoQueue()
        self._tasks: set[asyncio.Task[Ran]] = set()

    async def open(self) -> None:
        """Start the fork servers.

        Raises ``ConfigurationError`` where programs cannot be confined, ``InfrastructureError`` without a process.
        """
        unreadable, *_ = await asyncio.gather(*(server.start() for server in self._servers))
        if unreadable:
            # Processes that fork programs import this module, and logs take as long to import as all that they need.
            from plaudit_wire.logs import get_logger

            get_logger(__name__).warning(
                "programs run as nobody, who may not read these folders of Python's modules: a program that imports a "
                "module which is not loaded beforehand fails. Install Python where everybody may read it",
                folders=unreadable,
            )
        for server in self._servers:
            self._free.put_nowait(server)

    async def run(self, run: RunProgram, on_begin: Callable[[], float] = lambda: math.inf) -> Ran:
        """Run a program once, on a free fork server.

        ``on_begin`` is called when it has one, and returns the seconds that are left for it; without any, it does not
        run.

        Raises ``DataError`` if the test case's input cannot be read, ``WorkerKilledError`` if fork servers die also
        under a program that is known to be good, and ``InfrastructureError`` if the machine is out of memory, gives the
        program no processor, or cannot start processes.
        """
        server = await self._free.get()
        left_s = on_begin()
        if left_s <= 0:
            self._free.put_nowait(server)
            return Ran("time limit")
        if left_s < run.limits.time_s:
            run = msgspec.structs.replace(run, limits=msgspec.structs.replace(run.limits, time_s=left_s))
        # A task of its own: a caller that is cancelled must not leave an answer behind for the next one.
        task = asyncio.create_task(self._run_on(server, run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        ran = await asyncio.shield(task)
        if ran.ending == "unprepared":
            raise DataError(f"ground_truth: the input of a test case cannot be passed to a program: {ran.reason}")
        if ran.ending == "killed":
            raise InfrastructureError(f"a program could not be run to its end: {ran.reason}")
        return ran

    async def _run_on(self, server: _ForkServer, run: RunProgram) -> Ran:
        try:
            return await _run_again_when_healthy(server, run)
        finally:
            self._free.put_nowait(server)

    async def close(self) -> None:
        """End all programs and fork servers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(server.stop() for server in self._servers))


_KNOWN_GOOD = RunProgram("print(6 * 7)", as_script=True)


async def _run_again_when_healthy(server: _ForkServer, run: RunProgram) -> Ran:
    """Run a program; when the fork server dies under it, find out whether the program or the machine is to blame.

    The program is, when a new fork server runs a program that is known to be good, dies again under this one, and the
    kernel has killed nothing for lack of memory. ``WorkerKilledError`` means that the machine is to blame.
    """
    before = num_oom_kills()
    try:
        return await server.run(run)
    except WorkerKilledError:
        good = await server.run(_KNOWN_GOOD)
        if good.ending != "finished" or num_oom_kills() > before:
            raise
    try:
        return await server.run(run)
    except WorkerKilledError as error:
        if num_oom_kills() > before:
            raise
        return Ran("crashed", reason=f"the sandbox's process died under it twice: {error}")


class _ForkServer:
    """Hold one fork server; start it again when it has died and is needed."""

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def start(self) -> list[str]:
        """Start it; return the folders of Python's modules that its programs may not read."""
        try:
            self._reader, self._writer = await asyncio.open_connection(sock=self._spawn())
            async with asyncio.timeout(_START_WITHIN_S):
                answer = await self._ask(self._prepare)
        except (OSError, EOFError, TimeoutError) as error:
            await self.stop()
            raise InfrastructureError(f"the sandbox's fork server does not start: {error!r}") from error
        if isinstance(answer, Unable):
            await self.stop()
            raise ConfigurationError(answer.message)
        assert isinstance(answer, Ready)
        return answer.unreadable

    def _spawn(self) -> socket.socket:
        environment = inherited_by_python() | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._process, ours = start_module("plaudit_sandbox.server", environment, subprocess.DEVNULL)
        return ours

    async def run(self, run: RunProgram) -> Ran:
        if self._process is None:
            await self.start()
        try:
            async with asyncio.timeout(run.limits.time_s * LONGEST_WAIT_FACTOR + _ANSWER_WITHIN_S):
                answer = await self._ask(run)
        except (OSError, EOFError, TimeoutError) as error:
            await self.stop()
            raise WorkerKilledError(f"the sandbox's fork server died or hung under a program: {error!r}") from error
        except asyncio.CancelledError:
            await self.stop()
            raise
        assert isinstance(answer, Ran)
        return answer

    async def _ask(self, message: Prepare | RunProgram) -> FromServer:
        assert self._reader is not None
        assert self._writer is not None
        self._writer.write(frame([message]))
        await self._writer.drain()
        length = int.from_bytes(await self._reader.readexactly(4), "little")
        (answer,) = _decoder.decode(await self._reader.readexactly(length))
        return answer

    async def stop(self) -> None:
        """End it and the program that it runs: both end when the connection is closed."""
        if self._writer is not None:
            self._writer.transport.abort()
        process, self._process, self._reader, self._writer = self._process, None, None, None
        if process is None:
            return
        with contextlib.suppress(PermissionError):  # a root that may not kill others: it ends with its connection
            process.kill()
        try:
            while process.poll() is None:  # noqa: ASYNC110 - no event tells of a process's end
                await asyncio.sleep(_LOOK_EVERY_S)
        finally:
            reap(process)


_STAR_MODULES = """string re datetime collections heapq bisect copy math random statistics itertools functools operator
    io sys json builtins typing""".split()  # noqa: SIM905 - a list of words
_NAMED_MODULES = [name for name in _STAR_MODULES if name not in {"builtins", "typing"}]
PREAMBLE = "".join(
    [*(f"from {name} import *\n" for name in _STAR_MODULES), *(f"import {name}\n" for name in _NAMED_MODULES)]
)
"""The imports that verl puts before every program: models often leave them out, as a contest's own machine has them."""
