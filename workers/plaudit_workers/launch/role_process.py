"""Be a process of a run that ``plaudit run`` started: write its log and its stamps, serve its role, say how it ended.

On this machine these processes are forks of one template, ``python -m plaudit_workers.launch.role_process``, which has
imported what most roles import, once for all, and shares that memory with them. The template does nothing else: it has
one thread, no event loop, no secret and no connection but that to ``plaudit run``. On Ray each is an actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import NoReturn

import msgspec

from plaudit_sandbox.lifetime import kill_with_group
from plaudit_sandbox.privileges import end_with
from plaudit_wire.errors import RefusedError
from plaudit_wire.frames import Frames, frame
from plaudit_wire.logs import configure_logs
from plaudit_workers.process import EXIT_CRASHED, EXIT_DONE, ProcessSettings, Serve, serve_until_signal
from plaudit_workers.timeline import STARTED, stamp, started_s

_ENDS_WITHIN_S = 10.0
_TEMPLATE = "template of the processes"
SHARED = ("plaudit_workers.service.worker", "plaudit_workers.service.gateway")
"""Modules that the template imports: all of a reward service, most of the metrics service, and the beginning of the
others. None of them may start a thread."""
_READ_BYTES = 1 << 16
_MOST_DESCRIPTORS = 64


class Start(msgspec.Struct, frozen=True, tag=True):
    """Ask the template for a process; what it reads from standard input comes as a file descriptor."""

    name: str
    serve: str
    """``module:function``."""


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Ask the template to send a process a signal; SIGKILL goes to its process group."""

    name: str
    number: int


class RoleEnded(msgspec.Struct, frozen=True):
    """Report the end of a process; sent by the template."""

    name: str
    code: int
    """Exit code; a negative number is that of the signal that killed it."""
    problem: str = ""
    """Why it could not be started."""


to_template = msgspec.msgpack.Decoder(list[Start | Signal])
from_template = msgspec.msgpack.Decoder(list[RoleEnded])


def worker_name(name: str) -> str:
    """Return a new name for each start: others claim the work of a dead process, and none takes it for this one's."""
    return f"{name}-{uuid.uuid4().hex[:8]}"


def begin() -> ProcessSettings:
    """Open the log of this process; return its settings."""
    stamp(STARTED, time_s=started_s())
    settings = ProcessSettings.from_environment()
    if settings.log_file is not None:
        _use_log(settings.log_file)
    configure_logs(settings.log_file, worker=settings.worker)
    return settings


def imported(serve: str) -> Serve:
    """Import the function that serves a role, named ``module:function``."""
    module, _, function = serve.partition(":")
    found: Serve = getattr(importlib.import_module(module), function)
    stamp("imported")
    return found


async def serve_metrics(_: ProcessSettings, stop: asyncio.Event) -> int:
    """Serve metrics under ``plaudit run``. The service is below workers in the import order, with its own settings."""
    from plaudit_metrics.service.serve import CannotServeError, serve
    from plaudit_metrics.service.settings import ServiceSettings

    try:
        await serve(ServiceSettings.from_environment(), stop)
    except CannotServeError as error:
        raise RefusedError(str(error)) from error
    return EXIT_DONE


def _use_log(log_file: Path) -> None:
    """Send the output of libraries to the log; write this process's id and name beside it, for whoever inspects it."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    log_file.with_suffix(".pid").write_text(f"{os.getpid()}\n")
    log_file.with_suffix(".worker").write_text(os.environ["PLAUDIT_WORKER"] + "\n")


def ending_file(log_file: Path) -> Path:
    """Return where a process on this machine writes how its role ended, beside its log."""
    return log_file.with_suffix(".ending")


class _Template:
    """Fork processes, send them signals and report their ends, until ``plaudit run`` closes the connection."""

    def __init__(self, connection: socket.socket, imported_s: float) -> None:
        self._connection = connection
        self._imported_s, self._cpu_s = imported_s, time.process_time()
        self._pid = os.getpid()
        self._frames = Frames()
        self._descriptors: list[int] = []
        """Standard inputs that arrived and wait for their ``Start``."""
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._running: dict[int, tuple[str, int]] = {}
        """``pidfd`` → name and process id."""
        self._forked = False

    def forked(self) -> str:
        """Return in each fork: the function that it serves."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._running:
                    self._reap(descriptor)
                    continue
                for message in self._receive():
                    if isinstance(message, Signal):
                        self._signal(message)
                    elif self._is_fork(message):
                        return message.serve

    def _is_fork(self, start: Start) -> bool:
        """Fork; return True in the child."""
        stdin = self._descriptors.pop(0)
        try:
            pid = os.fork()
        except OSError as error:
            self._send(RoleEnded(start.name, EXIT_CRASHED, str(error)))
            pid = -1
        if pid == 0:
            self._begin(start.name, stdin)
            return True
        os.close(stdin)
        if pid > 0:
            handle = os.pidfd_open(pid)
            self._running[handle] = (start.name, pid)
            self._poll.register(handle, select.POLLIN)
            self._forked = True
        return False

    def _begin(self, name: str, stdin: int) -> None:
        """Keep nothing of the template but what it imported."""
        os.setsid()
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text(name)  # for ps and top; all have one command line
        end_with(self._pid)
        os.dup2(stdin, 0)
        for descriptor in (stdin, *self._descriptors, *self._running):
            os.close(descriptor)
        self._connection.close()
        os.environ.update(msgspec.json.decode(sys.stdin.buffer.read(), type=dict[str, str]))
        if not self._forked:
            stamp(STARTED, _TEMPLATE, time_s=started_s(self._pid))
            stamp("imported", _TEMPLATE, time_s=self._imported_s, cpu_s=self._cpu_s)

    def _signal(self, message: Signal) -> None:
        for name, pid in self._running.values():
            if name == message.name and message.number == signal.SIGKILL:
                kill_with_group(pid)
            elif name == message.name:
                os.kill(pid, message.number)

    def _reap(self, handle: int) -> None:
        name, pid = self._running.pop(handle)
        self._poll.unregister(handle)
        os.close(handle)
        kill_with_group(pid)  # what it left; until it is reaped no other process can get its id
        self._send(RoleEnded(name, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))

    def _send(self, message: RoleEnded) -> None:
        with contextlib.suppress(OSError):  # the run has ended; so does this process
            self._connection.sendall(frame([message]))

    def _receive(self) -> list[Start | Signal]:
        data, descriptors, _, _ = socket.recv_fds(self._connection, _READ_BYTES, _MOST_DESCRIPTORS)
        if not data:
            os._exit(0)  # the kernel ends the forks
        self._descriptors += descriptors
        return [message for body in self._frames.feed(data) for message in to_template.decode(body)]


def main() -> NoReturn:
    """Be the template; in a fork, serve its role.

    A fork gets its environment from standard input: any program of this user can read what it started with, and the
    template never holds the secrets of one role, which others would inherit.
    """
    end_with(int(sys.argv[2]))
    gc.disable()
    for module in SHARED:
        importlib.import_module(module)
    gc.freeze()  # a collection in a fork would copy all pages that it shares
    serve = _Template(socket.socket(fileno=int(sys.argv[1])), time.time()).forked()
    gc.enable()
    settings = begin()
    ending = asyncio.run(serve_until_signal(imported(serve), settings))
    assert settings.log_file is not None
    ending_file(settings.log_file).write_bytes(msgspec.json.encode(ending))
    late = threading.Timer(_ENDS_WITHIN_S, os._exit, [ending.code])  # a library's thread may hold the process
    late.daemon = True
    late.start()
    sys.exit(ending.code)


if __name__ == "__main__":
    main()
