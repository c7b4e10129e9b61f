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
import socket
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import NoReturn

import msgspec

from plaudit_sandbox.lifetime import ForkTemplate
from plaudit_sandbox.privileges import end_with
from plaudit_wire.errors import RefusedError
from plaudit_wire.logs import configure_logs
from plaudit_workers.process import EXIT_CRASHED, EXIT_DONE, ProcessSettings, Serve, serve_until_signal
from plaudit_workers.timeline import STARTED, stamp, started_s

_ENDS_WITHIN_S = 10.0
_TEMPLATE = "template of the processes"
SHARED = ("plaudit_workers.service.worker", "plaudit_workers.service.gateway")
"""Modules that the template imports: all of a reward service, most of the metrics service, and the beginning of the
others. None of them may start a thread."""


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


class _Template(ForkTemplate[Start | Signal, str]):
    """Fork processes, send them signals and report their ends, until ``plaudit run`` closes the connection."""

    def __init__(self, connection: socket.socket, imported_s: float) -> None:
        super().__init__(connection, to_template)
        self._imported_s, self._cpu_s = imported_s, time.process_time()
        self._pid = os.getpid()
        self._forked = False

    def forked(self) -> str:
        """Return in each fork: the function that it serves."""
        while True:
            for message in self.wait():
                if isinstance(message, Signal):
                    self.send_signal(message.name, message.number)
                elif self._is_fork(message):
                    return message.serve

    def ended(self, pid: int, key: str | None, code: int) -> None:
        """Report the end of a process."""
        if key is not None:
            self.send(RoleEnded(key, code))

    def _is_fork(self, start: Start) -> bool:
        """Fork; return True in the child."""
        try:
            stdin = self.fork(start.name)
        except OSError as error:
            self.send(RoleEnded(start.name, EXIT_CRASHED, str(error)))
            return False
        if stdin is None:
            self._forked = True
            return False
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text(start.name)  # for ps and top; all have one command line
        os.dup2(stdin, 0)
        os.close(stdin)
        os.environ.update(msgspec.json.decode(sys.stdin.buffer.read(), type=dict[str, str]))
        if not self._forked:
            stamp(STARTED, _TEMPLATE, time_s=started_s(self._pid))
            stamp("imported", _TEMPLATE, time_s=self._imported_s, cpu_s=self._cpu_s)
        return True


def main() -> NoReturn:
    """Be the template; in a fork, serve its role.

    A fork gets its environment from standard input: any program of this user can read what it started with, and the
    template never holds the secrets of one role, which others would inherit.
    """
    end_with(int(sys.argv[2]))
    gc.disable()
    for module in SHARED:
        importlib.import_module(module)
    template = _Template(socket.socket(fileno=int(sys.argv[1])), time.time())
    template.freeze()
    try:
        serve = template.forked()
    except EOFError:
        os._exit(0)  # the kernel ends the forks
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
