"""Supervise one run: read what the program prints, end it at its limits, classify how it ended."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec

from plaudit_reward.code.sandbox.child import CONFINED, RAISED
from plaudit_reward.code.sandbox.limits import ProgramLimits
from plaudit_reward.code.sandbox.messages import Ending, Ran, RunProgram
from plaudit_reward.code.sandbox.oom import num_oom_kills
from plaudit_reward.code.sandbox.template import Exit, ProgramProcess, Template
from plaudit_wire.signals import signal_name

_LOOK_EVERY_S = 0.02
"""Between two looks at the number of threads."""
_CONFINED_WITHIN_S = 20.0
"""However busy the machine is; the program's own time begins only then."""
_READ_BYTES = 1 << 16
_TAIL_BYTES = 2_000
_THREADS = re.compile(rb"^Threads:\s*(\d+)", re.MULTILINE)


@dataclass
class Pipes:
    """The files and pipes of a run, in the supervising process."""

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


@dataclass
class _Watched:
    """The state of a running program."""

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

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began_s

    @property
    def left_s(self) -> float:
        return (self.limits.time_s if self.confined else _CONFINED_WITHIN_S) - self.seconds

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

    Raises:
        EOFError: the sandbox or the template is gone.
    """
    watched = _Watched(process, pipes, limits)
    open_pipes = {pipes.stdout, pipes.stderr}
    poll = select.poll()
    for descriptor in (*open_pipes, template.connection.fileno()):
        poll.register(descriptor, select.POLLIN)
    poll.register(connection, select.POLLRDHUP)
    exited = False
    while not exited:
        for descriptor, _ in poll.poll(min(_LOOK_EVERY_S, max(0.0, watched.left_s)) * 1000):
            if descriptor == connection.fileno():
                watched.end("killed")
                raise EOFError
            if descriptor == template.connection.fileno():
                exited = True
            elif not _read(watched, descriptor):
                poll.unregister(descriptor)
                open_pipes.discard(descriptor)
        if not exited:
            _check(watched)
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
        watched.num_stderr += len(data)
        watched.stderr = (watched.stderr + data)[-_TAIL_BYTES:]
    return bool(data)


def _check(watched: _Watched) -> None:
    if watched.num_printed > watched.limits.output_bytes:
        watched.end("output limit")
    elif watched.left_s <= 0:
        watched.end("time limit")
    elif _num_threads(watched.process.pid) > watched.limits.threads:
        watched.end("thread limit")


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
        cpu_s=exited.cpu_s,
        peak_bytes=exited.peak_bytes,
    )


def _ending(watched: _Watched, exited: Exit, last_line: str) -> tuple[Ending, str]:
    if not watched.confined:
        return "killed", f"its process could not be confined: {last_line or 'it was ended before that'}"
    if watched.over is not None:
        return watched.over, ""
    code = os.waitstatus_to_exitcode(exited.status)
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
