"""Supervise runs of programs, one at a time: have them forked, read what they print, end them at their limits.

``sandbox`` starts it with an empty environment, as ``python -m plaudit_sandbox.server <file descriptor> <parent's
process id>``. It loads Python's modules, gives up its privileges, and forks the template from which every program's
process is forked; only then does it receive data of runs. It ends with its parent.

The template never holds data of a run: the program's process, once forked, reads its program from a file in memory that
the supervising process made. So nothing of one sample can be found in the memory of another's program.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
import select
import signal
import socket
import struct
import sys
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NoReturn, Self

import msgspec

from plaudit_sandbox import confinement
from plaudit_sandbox.confinement import architecture
from plaudit_sandbox.privileges import drop_privileges, end_with
from plaudit_sandbox.program import CONFINED, RAISED, UNPREPARED, run_and_leave
from plaudit_sandbox.sandbox import (
    LONGEST_WAIT_FACTOR,
    Ending,
    FromServer,
    Prepare,
    ProgramLimits,
    Ran,
    Ready,
    RunProgram,
    ToServer,
    Unable,
    num_oom_kills,
    offer_to_the_oom_killer,
)
from plaudit_wire.errors import ConfigurationError
from plaudit_wire.frames import Frames, frame, signal_name

_FORK = b"f"
_NUM_DESCRIPTORS = 4
_PID = struct.Struct("=i")
_EXIT = struct.Struct("=iddQ")


class ProgramProcess(NamedTuple):
    """Name a program's process."""

    pid: int
    handle: int
    """A file descriptor (``pidfd``) that cannot come to mean another process."""


class Exit(NamedTuple):
    """Report the end of a program's process."""

    status: int
    """As ``waitpid`` returns it."""
    cpu_s: float
    peak_bytes: int


class Template:
    """Fork programs, from the supervising process."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def fork(self, task: int, stdin: int, stdout: int, stderr: int) -> ProgramProcess:
        """Fork a program's process, which reads its ``RunProgram`` from the file ``task``.

        Raises ``EOFError`` if the template process is gone, or could not fork.
        """
        try:
            socket.send_fds(self.connection, [_FORK], [task, stdin, stdout, stderr])
            data, descriptors, _, _ = socket.recv_fds(self.connection, _PID.size, 1)
        except OSError as error:
            raise EOFError from error
        if not data or len(descriptors) != 1:
            raise EOFError
        return ProgramProcess(_PID.unpack(data)[0], descriptors[0])

    def exit(self) -> Exit:
        """Return how the process ended, once ``connection`` can be read; raise ``EOFError`` without the template."""
        try:
            data = self.connection.recv(_EXIT.size)
        except OSError as error:
            raise EOFError from error
        if len(data) < _EXIT.size:
            raise EOFError
        status, user_s, system_s, peak_bytes = _EXIT.unpack(data)
        return Exit(status, user_s + system_s, peak_bytes)


def start_template(ruleset: int | None) -> Template:
    """Fork this process into a template, before it has held data of any run."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    supervisor = os.getpid()
    if os.fork() == 0:
        try:
            ours.close()
            _serve(theirs, ruleset, supervisor)
        finally:
            os._exit(1)
    theirs.close()
    return Template(ours)


def _serve(connection: socket.socket, ruleset: int | None, supervisor: int) -> NoReturn:
    end_with(supervisor)
    template = os.getpid()
    # Close what the supervising process has open, such as its connection to the worker.
    kept = sorted({0, 1, 2, connection.fileno(), ruleset or 0})
    for before, after in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(before + 1, after)
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, 1, _NUM_DESCRIPTORS)
        if not data or len(descriptors) != _NUM_DESCRIPTORS:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            task, *streams = descriptors
            run_and_leave(task, (streams[0], streams[1], streams[2]), ruleset, template)
        for descriptor in descriptors:
            os.close(descriptor)
        handle = os.pidfd_open(pid)
        socket.send_fds(connection, [_PID.pack(pid)], [handle])
        os.close(handle)
        _, status, usage = os.wait4(pid, 0)
        connection.send(_EXIT.pack(status, usage.ru_utime, usage.ru_stime, usage.ru_maxrss * 1024))


_LOOK_EVERY_S = 0.02
"""Between two looks at the number of threads, and at the use of processors."""
_LOOK_AT_LEAST_S = 0.001
_CONFINED_WITHIN_S = 20.0
"""However busy the machine is; the program's own time begins only then."""
_READ_BYTES = 1 << 16
_TAIL_BYTES = 2_000
_THREADS = re.compile(rb"^Threads:\s*(\d+)", re.MULTILINE)


@dataclass
class Pipes:
    """Hold the files and pipes of a run, in the supervising process."""

    task: int
    """A file in memory with the ``RunProgram``, without its input."""
    stdin: int
    """A file in memory with the input, so that a program may read it or not."""
    stdout: int
    stdout_end: int
    """The program's end."""
    stderr: int
    stderr_end: int

    @classmethod
    def open(cls, run: RunProgram) -> Self:
        """Make them, with the program and its input."""
        task = _file("task", msgspec.msgpack.encode(msgspec.structs.replace(run, stdin="")))
        return cls(task, _file("stdin", run.stdin.encode()), *os.pipe(), *os.pipe())

    def close_ends(self) -> None:
        """Close the program's ends."""
        for descriptor in (self.task, self.stdin, self.stdout_end, self.stderr_end):
            os.close(descriptor)

    def close(self) -> None:
        """Close the supervisor's ends."""
        os.close(self.stdout)
        os.close(self.stderr)


def _file(name: str, content: bytes) -> int:
    file = os.memfd_create(name)
    data = memoryview(content)
    while data:
        data = data[os.write(file, data) :]
    os.lseek(file, 0, os.SEEK_SET)
    return file


class ProcessorUse(NamedTuple):
    """Report how a process has used the processors; nothing where the kernel does not tell."""

    ran_s: float = 0.0
    """All threads together."""
    waited_s: float = 0.0
    """The thread that waited most could have run, but others did. A wait that has not ended is not counted yet."""
    ready: bool = False
    """A thread runs now, or waits for a processor."""


@dataclass
class _Watched:
    """Hold the state of a running program."""

    process: ProgramProcess
    pipes: Pipes
    limits: ProgramLimits
    num_oom_kills: int = field(default_factory=num_oom_kills)
    """Before it ran."""
    began_s: float = field(default_factory=time.monotonic)
    """When it was confined; before that, when its process was made."""
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    num_stderr: int = 0
    confined: bool = False
    """The program has begun."""
    over: Ending | None = None
    """The limit that it passed."""
    use: ProcessorUse = field(default_factory=ProcessorUse)
    """When it was last looked at."""
    use_before: ProcessorUse = field(default_factory=ProcessorUse)
    """When it began."""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began_s

    @property
    def waited_s(self) -> float:
        """Return how long it has waited for a processor that others used."""
        return max(0.0, self.use.waited_s - self.use_before.waited_s)

    @property
    def left_s(self) -> float:
        """Return the seconds that it has left, if it does not wait for a processor now."""
        return (self.limits.time_s if self.confined else _CONFINED_WITHIN_S) - self.seconds + self.waited_s

    @property
    def is_late(self) -> bool:
        """Return True if its time is up: it has run for that time, or has nothing to run when the time is up."""
        ran_s = self.use.ran_s - self.use_before.ran_s
        waits = self.confined and self.use.ready and ran_s < self.limits.time_s
        return self.left_s <= 0 and not waits and not self._has_ended()

    def _has_ended(self) -> bool:
        """Return True if it has ended by itself, which the template reports when it gets a processor."""
        return bool(select.select([self.process.handle], [], [], 0)[0])

    def look(self) -> None:
        """Note how it uses the processors."""
        use = _processor_use(self.process.pid)
        self.use = use._replace(waited_s=max(use.waited_s, self.use.waited_s))  # of threads that have ended, too

    @property
    def num_printed(self) -> int:
        return len(self.stdout) + self.num_stderr

    def end(self, ending: Ending) -> None:
        """End it. It could not start another process, nor leave this one's reach."""
        self.over = self.over or ending
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.process.handle, signal.SIGKILL)


def supervise(
    process: ProgramProcess, pipes: Pipes, limits: ProgramLimits, template: Template, connection: socket.socket
) -> Ran:
    """Wait until the program has ended, by itself, at a limit, or because the sandbox closed ``connection``.

    Raises ``EOFError`` if the sandbox or the template is gone.
    """
    watched = _Watched(process, pipes, limits)
    open_pipes = {pipes.stdout, pipes.stderr}
    poll = select.poll()
    for descriptor in (*open_pipes, template.connection.fileno()):
        poll.register(descriptor, select.POLLIN)
    poll.register(connection, select.POLLRDHUP)
    exited = False
    while not exited:
        for descriptor, _ in poll.poll(min(_LOOK_EVERY_S, max(_LOOK_AT_LEAST_S, watched.left_s)) * 1000):
            if descriptor == connection.fileno():
                watched.end("killed")
                raise EOFError
            if descriptor == template.connection.fileno():
                exited = True
            elif not _read(watched, descriptor):
                poll.unregister(descriptor)
                open_pipes.discard(descriptor)
        if not exited:
            watched.look()
            _end_at_a_limit(watched)
    for descriptor in open_pipes:
        while _read(watched, descriptor) and watched.num_printed <= limits.output_bytes:
            continue
    return _ran(watched, template.exit())


def _read(watched: _Watched, descriptor: int) -> bool:
    """Read a part of the output; return False at its end."""
    data = os.read(descriptor, _READ_BYTES)
    if descriptor == watched.pipes.stdout:
        watched.stdout += data
    else:
        if not watched.confined and data.startswith(CONFINED):
            watched.confined, watched.began_s = True, time.monotonic()
            watched.look()
            watched.use_before = watched.use
        watched.num_stderr += len(data)
        watched.stderr = (watched.stderr + data)[-_TAIL_BYTES:]
    return bool(data)


def _end_at_a_limit(watched: _Watched) -> None:
    if watched.num_printed > watched.limits.output_bytes:
        watched.end("output limit")
    elif watched.is_late:
        watched.end("time limit")
    elif watched.confined and watched.seconds > watched.limits.time_s * LONGEST_WAIT_FACTOR:
        watched.end("killed")
    elif _num_threads(watched.process.pid) > watched.limits.threads:
        watched.end("thread limit")


def _processor_use(pid: int) -> ProcessorUse:
    """Return how a process has used the processors."""
    ran_s = waited_s = 0.0
    ready = False
    with contextlib.suppress(OSError, IndexError, ValueError):  # it has ended, or this machine hides processes
        for thread in Path(f"/proc/{pid}/task").iterdir():
            waited_s = max(waited_s, int((thread / "schedstat").read_bytes().split()[1]) / 1e9)
            ready = ready or _stat(thread)[0] == b"R"
        ran_s = sum(map(int, _stat(Path(f"/proc/{pid}"))[11:13])) / os.sysconf("SC_CLK_TCK")
    return ProcessorUse(ran_s, waited_s, ready)


def _stat(folder: Path) -> list[bytes]:
    """Return the fields of a process or thread from its state on; its name before may hold anything."""
    return (folder / "stat").read_bytes().rpartition(b")")[2].split()


def _num_threads(pid: int) -> int:
    try:
        found = _THREADS.search(Path(f"/proc/{pid}/status").read_bytes())
    except OSError:
        return 0  # it has ended, or this machine hides processes: their stacks count as memory
    return int(found[1]) if found else 0


def _ran(watched: _Watched, exited: Exit) -> Ran:
    if watched.num_printed > watched.limits.output_bytes:
        watched.over = watched.over or "output limit"
    last_line = watched.stderr.removeprefix(CONFINED).decode(errors="replace").strip().rpartition("\n")[2]
    ending, reason = _ending(watched, exited, last_line)
    return Ran(
        ending=ending,
        stdout=bytes(watched.stdout) if ending == "finished" else b"",
        reason=reason,
        wall_s=watched.seconds,
        waited_s=watched.waited_s,
        cpu_s=exited.cpu_s,
        peak_bytes=exited.peak_bytes,
    )


def _ending(watched: _Watched, exited: Exit, last_line: str) -> tuple[Ending, str]:
    code = os.waitstatus_to_exitcode(exited.status)
    if not watched.confined and code == UNPREPARED:
        return "unprepared", last_line
    if not watched.confined:
        return "killed", f"its process could not be confined: {last_line or 'it was ended before that'}"
    if watched.over == "killed":
        return "killed", f"others used the processors for {watched.waited_s:.0f} of its {watched.seconds:.0f} s"
    if watched.over is not None:
        return watched.over, ""
    if code == 0:
        return "finished", ""
    if code == RAISED and last_line.startswith("MemoryError"):
        return "memory limit", last_line
    if code == RAISED:
        return "raised", last_line
    if code > 0:
        return "exited", f"exit code {code}"
    if -code in (signal.SIGXCPU, signal.SIGKILL) and exited.cpu_s > watched.limits.time_s:
        return "time limit", "of CPU"
    if -code == signal.SIGKILL and num_oom_kills() > watched.num_oom_kills:
        return "killed", "the kernel killed a process for lack of memory (memory.events): give the pod more"
    return "crashed", signal_name(-code)


_REQUEST_BYTES = 1 << 20
_MODULES = """abc array ast asyncio base64 binascii bisect builtins calendar cmath codecs collections collections.abc
    contextlib copy csv ctypes dataclasses datetime decimal difflib enum fractions functools gc hashlib heapq html
    inspect io itertools json math multiprocessing numbers operator os pathlib platform pprint queue random re
    resource secrets select shutil signal socket statistics string struct subprocess sys tempfile textwrap threading
    time timeit traceback types typing unicodedata unittest urllib.parse uuid warnings weakref zlib
    encodings.ascii encodings.idna encodings.latin_1 encodings.utf_16
    numpy numpy.linalg numpy.random""".split()  # noqa: SIM905 - a list of words
"""Loaded beforehand where they are installed: programs import them at no cost, also where no file can be opened."""


def main() -> int:
    """Prepare, report, and serve runs until the sandbox is gone."""
    end_with(int(sys.argv[2]))
    connection = socket.socket(fileno=int(sys.argv[1]))
    messages = _Messages(connection)
    prepare = messages.receive()
    assert isinstance(prepare, Prepare)
    try:
        ruleset, unreadable = _prepare(prepare)
    except (ConfigurationError, OSError) as error:
        messages.send(Unable(str(error)))
        return 2
    end_with(int(sys.argv[2]))  # a change of user took it back
    template = start_template(ruleset)
    messages.send(Ready(unreadable))
    with contextlib.suppress(EOFError):
        while True:
            run = messages.receive()
            assert isinstance(run, RunProgram)
            messages.send(_run(run, template, connection))
    return 0


def _prepare(prepare: Prepare) -> tuple[int | None, list[str]]:
    """Load modules, make the ruleset, give up privileges; return the ruleset, and folders that are out of reach now.

    Raises ``ConfigurationError``.
    """
    architecture()
    for name in _MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    ruleset, folders = None, set()
    if confinement.abi():
        folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
        readable = [*sorted(folders), "/lib", "/lib64", "/usr/lib", "/usr/lib64"]  # of modules and shared libraries
        ruleset = confinement.make_ruleset(map(Path, readable))
    elif not prepare.allow_without_landlock:
        raise ConfigurationError(
            "the kernel of this machine has no Landlock (Linux 5.13, CONFIG_SECURITY_LANDLOCK, 'landlock' in the "
            "kernel's lsm= list), so programs cannot be kept from reading files. Name a Sandbox Fusion server in the "
            "scorer's url, or set allowWithoutLandlock: true: programs then cannot open any file, and can import only "
            "modules that are loaded beforehand"
        )
    offer_to_the_oom_killer()
    drop_privileges()
    gc.freeze()
    return ruleset, sorted(folder for folder in folders if not os.access(folder, os.R_OK | os.X_OK))


def _run(run: RunProgram, template: Template, connection: socket.socket) -> FromServer:
    pipes = Pipes.open(run)
    try:
        process = template.fork(pipes.task, pipes.stdin, pipes.stdout_end, pipes.stderr_end)
        pipes.close_ends()
        try:
            return supervise(process, pipes, run.limits, template, connection)
        finally:
            os.close(process.handle)
    finally:
        pipes.close()


class _Messages:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = Frames()
        self._waiting: list[ToServer] = []
        self._decoder = msgspec.msgpack.Decoder(list[ToServer])

    def send(self, message: FromServer) -> None:
        try:
            self._connection.sendall(frame([message]))
        except BrokenPipeError as error:
            raise EOFError from error

    def receive(self) -> ToServer:
        while not self._waiting:
            data = self._connection.recv(_REQUEST_BYTES)
            if not data:
                raise EOFError
            for body in self._frames.feed(data):
                self._waiting += self._decoder.decode(body)
        return self._waiting.pop(0)


if __name__ == "__main__":
    raise SystemExit(main())
