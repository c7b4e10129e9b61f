"""Supervise runs of programs, one at a time: have them forked, read what they print, end them at their limits.

``sandbox`` starts it with an empty environment, as ``python -m plaudit_reward.code.sandbox.fork_server <file
descriptor> <parent's process id>``. It loads Python's modules, gives up its privileges, and forks the template from
which every program's process is forked; only then does it receive data of runs. It ends with its parent.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import sysconfig
from pathlib import Path

import msgspec

from plaudit_reward.code.sandbox.confinement import landlock
from plaudit_reward.code.sandbox.confinement.privileges import drop_privileges
from plaudit_reward.code.sandbox.confinement.seccomp import architecture, prctl
from plaudit_reward.code.sandbox.limits import offer_to_the_oom_killer
from plaudit_reward.code.sandbox.messages import FromServer, Prepare, Ready, RunProgram, ToServer, Unable
from plaudit_reward.code.sandbox.supervision import Pipes, supervise
from plaudit_reward.code.sandbox.template import Template, start_template
from plaudit_wire.errors import ConfigurationError
from plaudit_wire.frames import Frames, frame

_PR_SET_PDEATHSIG = 1
_READ_BYTES = 1 << 20

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
    _die_with(int(sys.argv[2]))
    connection = socket.socket(fileno=int(sys.argv[1]))
    messages = _Messages(connection)
    prepare = messages.receive()
    assert isinstance(prepare, Prepare)
    try:
        ruleset = _prepare(prepare)
    except (ConfigurationError, OSError) as error:
        messages.send(Unable(str(error)))
        return 2
    _die_with(int(sys.argv[2]))  # a change of user took it back
    template = start_template(ruleset)
    messages.send(Ready())
    with contextlib.suppress(EOFError):
        while True:
            run = messages.receive()
            assert isinstance(run, RunProgram)
            messages.send(_run(run, template, connection))
    return 0


def _prepare(prepare: Prepare) -> int | None:
    """Load modules, make the ruleset, give up privileges; return the ruleset.

    Raises:
        ConfigurationError: programs cannot be confined on this machine.
    """
    architecture()
    for name in _MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    ruleset = None
    if landlock.abi():
        ruleset = landlock.make_ruleset(_readable())
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
    return ruleset


def _readable() -> list[Path]:
    """Return the folders of modules and shared libraries."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return [Path(folder) for folder in sorted(folders)] + [
        Path(p) for p in ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
    ]


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
            data = self._connection.recv(_READ_BYTES)
            if not data:
                raise EOFError
            for body in self._frames.feed(data):
                self._waiting += self._decoder.decode(body)
        return self._waiting.pop(0)


def _die_with(parent: int) -> None:
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    raise SystemExit(main())
