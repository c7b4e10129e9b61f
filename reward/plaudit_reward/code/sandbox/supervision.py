"""The fork server's watch over one run: reads what it prints, ends it at its limits, says how it ended."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from plaudit_reward.code.sandbox.child import LOCKED, RAISED
from plaudit_reward.code.sandbox.limits import Limits
from plaudit_reward.code.sandbox.messages import Ending, Ran

_LOOK_EVERY_S = 0.02
"""Between two looks at the number of threads, and at a program that closed its output and goes on."""
_AFTER_OUTPUT_S = 0.0005
_LOCKED_WITHIN_S = 20.0
"""However busy the machine is; the program's own time begins only then."""
_READ_BYTES = 1 << 16
_TAIL_BYTES = 2_000
_THREADS = re.compile(rb"^Threads:\s*(\d+)", re.MULTILINE)


@dataclass
class Pipes:
    """A run's three streams, seen from the fork server."""

    stdin: int
    """A file in memory, so that a program may read it or not."""
    stdout: int
    stdout_end: int
    """The program's end."""
    stderr: int
    stderr_end: int

    @classmethod
    def open(cls, stdin: str) -> Self:
        """Makes them, with the program's input."""
        file = os.memfd_create("stdin")
        data = memoryview(stdin.encode("utf-8", "surrogatepass"))
        while data:
            data = data[os.write(file, data) :]
        os.lseek(file, 0, os.SEEK_SET)
        return cls(file, *os.pipe(), *os.pipe())

    def close_ends(self) -> None:
        """Closes what is the program's."""
        for descriptor in (self.stdin, self.stdout_end, self.stderr_end):
            os.close(descriptor)

    def close(self) -> None:
        """Closes the rest."""
        os.close(self.stdout)
        os.close(self.stderr)


@dataclass
class _Watched:
    """What is known of a running program."""

    pid: int
    pipes: Pipes
    limits: Limits
    began_s: float = field(default_factory=time.monotonic)
    """When it was locked up; before that, when its process was made."""
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    num_stderr: int = 0
    locked: bool = False
    """The program has begun."""
    over: Ending | None = None
    """The limit that it passed."""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began_s

    @property
    def left_s(self) -> float:
        return (self.limits.time_s if self.locked else _LOCKED_WITHIN_S) - self.seconds

    @property
    def num_printed(self) -> int:
        return len(self.stdout) + self.num_stderr

    def end(self, ending: Ending) -> None:
        """Ends it. Nothing is left: it could not start another process, nor leave this one's reach."""
        self.over = self.over or ending
        os.kill(self.pid, signal.SIGKILL)


def supervise(pid: int, pipes: Pipes, limits: Limits, connection: socket.socket) -> Ran:
    """Waits until the program has ended, by itself or at a limit.

    Args:
        pid: its process, a child of this one.
        pipes: what it prints.
        limits: when to end it.
        connection: to the sandbox; when that is gone, the program is ended.

    Raises:
        EOFError: the sandbox is gone.
    """
    watched = _Watched(pid, pipes, limits)
    open_pipes = {pipes.stdout, pipes.stderr}
    poll = select.poll()
    for descriptor in open_pipes:
        poll.register(descriptor, select.POLLIN)
    poll.register(connection, select.POLLRDHUP)
    while (ended := os.wait4(pid, os.WNOHANG))[0] == 0:
        wait_s = min(_LOOK_EVERY_S, max(0.0, watched.left_s))
        if not open_pipes:
            wait_s = min(wait_s, _AFTER_OUTPUT_S)
        for descriptor, _ in poll.poll(wait_s * 1000):
            if descriptor == connection.fileno():
                watched.end("killed")
                os.waitpid(pid, 0)
                raise EOFError
            if not _read(watched, descriptor):
                poll.unregister(descriptor)
                open_pipes.discard(descriptor)
        _check(watched)
    for descriptor in open_pipes:
        while _read(watched, descriptor) and watched.over is None:
            continue
    return _ran(watched, ended[1], ended[2].ru_utime + ended[2].ru_stime, ended[2].ru_maxrss * 1024)


def _read(watched: _Watched, descriptor: int) -> bool:
    """Takes some of what was printed; False at its end."""
    data = os.read(descriptor, _READ_BYTES)
    if descriptor == watched.pipes.stdout:
        watched.stdout += data
    else:
        if not watched.locked and data.startswith(LOCKED):
            watched.locked, watched.began_s = True, time.monotonic()
        watched.num_stderr += len(data)
        watched.stderr = (watched.stderr + data)[-_TAIL_BYTES:]
    return bool(data)


def _check(watched: _Watched) -> None:
    if watched.num_printed > watched.limits.output_bytes:
        watched.end("output limit")
    elif watched.left_s <= 0:
        watched.end("time limit")
    elif _num_threads(watched.pid) > watched.limits.threads:
        watched.end("thread limit")


def _num_threads(pid: int) -> int:
    try:
        found = _THREADS.search(Path(f"/proc/{pid}/status").read_bytes())
    except OSError:
        return 0  # it has ended, or this machine hides processes: their stacks count as memory
    return int(found[1]) if found else 0


def _ran(watched: _Watched, status: int, cpu_s: float, peak_bytes: int) -> Ran:
    if watched.num_printed > watched.limits.output_bytes:
        watched.over = watched.over or "output limit"
    last_line = watched.stderr.removeprefix(LOCKED).decode(errors="replace").strip().rpartition("\n")[2]
    ending, reason = _ending(watched, status, cpu_s, last_line)
    return Ran(
        ending=ending,
        stdout=bytes(watched.stdout) if ending == "finished" else b"",
        reason=reason,
        wall_s=watched.seconds,
        cpu_s=cpu_s,
        peak_bytes=peak_bytes,
    )


def _ending(watched: _Watched, status: int, cpu_s: float, last_line: str) -> tuple[Ending, str]:
    if not watched.locked:
        return "killed", f"it could not be locked up: {last_line or 'its process was ended before that'}"
    if watched.over is not None:
        return watched.over, ""
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return "finished", ""
    if code == RAISED and last_line.startswith("MemoryError"):
        return "memory limit", last_line
    if code == RAISED:
        return "raised", last_line
    if code > 0:
        return "exited", f"exit code {code}"
    if -code in (signal.SIGXCPU, signal.SIGKILL) and cpu_s > watched.limits.time_s:
        return "time limit", "of CPU"
    if -code == signal.SIGKILL:
        return "killed", "SIGKILL that the sandbox did not send (is the machine out of memory?)"
    return "crashed", signal.Signals(-code).name
