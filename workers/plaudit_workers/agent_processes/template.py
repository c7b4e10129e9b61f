"""Load users' files once, and fork a process for each sample that needs them: the template process.

Started as ``python -m plaudit_workers.agent_processes.template <file descriptor> <parent's process id>`` by
``processes``. A fork imports nothing again and shares the memory of everything that the files imported. The template
itself never runs a tool, so it can always kill a process of a sample that hangs. It ends with its parent, and they end
with it. Each sample's process is confined (``confinement``); when it ends, or the processes below it exceed their
limits, all that it started is killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any

from plaudit_reward.isolation.child.lifetime import end_with
from plaudit_wire.errors import ConfigurationError
from plaudit_wire.frames import Frames, frame
from plaudit_workers.agent_processes import process_trees
from plaudit_workers.agent_processes.confinement import adopt_orphans, confine, machine_memory_bytes
from plaudit_workers.agent_processes.messages import (
    Ended,
    Fork,
    Kill,
    Load,
    Loaded,
    ProcessLimits,
    Refused,
    ToTemplate,
    to_template,
)
from plaudit_workers.agent_processes.sample_process import run_sample
from plaudit_workers.agent_processes.sources.load import load

_READ_BYTES = 1 << 16
_MOST_DESCRIPTORS = 64
_WATCH_EVERY_S = 1.0
_END_WITHIN_S = 1.0


def main() -> int:
    """Load the files, report, fork."""
    end_with(int(sys.argv[2]))
    faulthandler.enable()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # the last lines of a killed tool are logged
    template = _Template(socket.socket(fileno=int(sys.argv[1])))
    try:
        return template.run()
    except EOFError:
        template.end()
        return 0


class _Template:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = Frames()
        self._descriptors: list[int] = []
        """Ends of connections that arrived and wait for their ``Fork``."""
        self._running: dict[int, int] = {}
        """Process id → number of its sample."""
        self._reasons: dict[int, str] = {}
        """Process id → the limit that it exceeded."""
        self._limits = ProcessLimits()
        self._wakeups: tuple[socket.socket, ...] = ()
        self._imported: set[int] = set()
        """Children that importing the files started."""

    def run(self) -> int:
        """Serve until the rollout closes the connection (``EOFError``)."""
        sources = self._receive()
        assert isinstance(sources[0], Load)
        try:
            loaded = load(sources[0].sources)
        except ConfigurationError as error:
            self._send(Refused(str(error)))
            return 2
        if threading.active_count() > 1:
            names = ", ".join(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
            print(f"importing the files started threads ({names}); they do not run in the processes of samples")
        self._limits = _filled(sources[0].limits)
        self._imported = process_trees.children_of_this_process()
        adopt_orphans()
        gc.freeze()  # a collection in a fork would copy all pages that it shares
        self._send(Loaded(loaded.descriptions, loaded.environment_kind))
        self._wakeups = wakeup, wake = socket.socketpair()
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        poll.register(wakeup, select.POLLIN)
        watched_s = time.monotonic()
        while True:
            ready = poll.poll(1e3 * _WATCH_EVERY_S if self._running else None)
            if time.monotonic() - watched_s >= _WATCH_EVERY_S:
                self._watch()
                watched_s = time.monotonic()
            for descriptor, _ in ready:
                if descriptor == wakeup.fileno():
                    wakeup.recv(_READ_BYTES)
                    self._reap()
                    continue
                for message in self._receive():
                    self._obey(message, loaded)

    def _obey(self, message: ToTemplate, loaded: Any) -> None:
        if isinstance(message, Fork):
            connection = self._descriptors.pop(0)
            pid = os.fork()
            if pid == 0:
                self._begin(connection, loaded)
            os.close(connection)
            self._running[pid] = message.number
        elif isinstance(message, Kill):
            for pid in [pid for pid, number in self._running.items() if number == message.number]:
                process_trees.kill(pid)

    def _begin(self, descriptor: int, loaded: Any) -> None:
        """Become the process of a sample."""
        status = 1
        try:
            template = os.getppid()
            os.setsid()
            end_with(template)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for connection in (self._connection, *self._wakeups):
                connection.close()
            for other in self._descriptors:
                os.close(other)
            confine(self._limits.memory_bytes)
            run_sample(socket.socket(fileno=descriptor), loaded)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):  # a tool may have closed or replaced them
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def end(self) -> None:
        """Kill the processes of all samples and all that they started."""
        deadline_s = time.monotonic() + _END_WITHIN_S
        while (started := process_trees.children_of_this_process() - self._imported) and time.monotonic() < deadline_s:
            for pid in started:
                process_trees.kill(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)

    def _watch(self) -> None:
        """Kill the processes of samples that exceed their limits."""
        limits = self._limits
        for pid, tree in process_trees.trees(self._running).items():
            if tree.num_threads > limits.threads:
                self._reasons[pid] = f"it had more than {limits.threads} processes and threads"
            elif tree.uses_more_than(limits.memory_bytes):
                self._reasons[pid] = f"its processes used more than {limits.memory_bytes >> 20} MiB"
            else:
                continue
            tree.kill()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                # Before it is reaped: until then no other process can get its id.
                process_trees.kill(ended.si_pid)
                _, status = os.waitpid(ended.si_pid, 0)
                number = self._running.pop(ended.si_pid, None)
                for orphan in process_trees.children_of_this_process() - self._running.keys() - self._imported:
                    process_trees.kill(orphan)
                if number is not None:
                    reason = self._reasons.pop(ended.si_pid, "")
                    self._send(Ended(number, os.waitstatus_to_exitcode(status), reason))

    def _send(self, message: Any) -> None:
        try:
            self._connection.sendall(frame([message]))
        except OSError as error:
            raise EOFError from error

    def _receive(self) -> list[ToTemplate]:
        messages: list[ToTemplate] = []
        while not messages:
            data, descriptors, _, _ = socket.recv_fds(self._connection, _READ_BYTES, _MOST_DESCRIPTORS)
            if not data:
                raise EOFError
            self._descriptors += descriptors
            messages += [message for body in self._frames.feed(data) for message in to_template.decode(body)]
        return messages


def _filled(limits: ProcessLimits) -> ProcessLimits:
    return limits if limits.memory_bytes else ProcessLimits(machine_memory_bytes() // 2, limits.threads)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # threads of the user's files must not keep the process alive
