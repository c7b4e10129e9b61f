"""The template process: loads users' files once and forks a process for each sample that needs them.

Started as ``python -m plaudit_workers.agent_processes.template <file descriptor> <parent's process id>`` by
``processes``. A fork imports nothing again and shares the memory of everything that the files imported. The template
itself never runs a tool, so it can always kill a process of a sample that hangs. It ends with its parent, and they end
with it.
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
from typing import Any

from plaudit_reward.errors import ConfigurationError
from plaudit_reward.isolation.lifetime import end_with
from plaudit_reward.isolation.messages import Frames, frame
from plaudit_workers.agent_processes.messages import Ended, Fork, Kill, Load, Loaded, Refused, ToTemplate, to_template
from plaudit_workers.agent_processes.sample_process import run_sample
from plaudit_workers.agent_processes.sources.load import load

_READ_BYTES = 1 << 16
_MOST_DESCRIPTORS = 64


def main() -> int:
    """Load the files, report, fork."""
    end_with(int(sys.argv[2]))
    faulthandler.enable()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # the last lines of a killed tool are logged
    template = _Template(socket.socket(fileno=int(sys.argv[1])))
    with contextlib.suppress(EOFError):
        return template.run()
    return 0


class _Template:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = Frames()
        self._descriptors: list[int] = []
        """Ends of connections that arrived and wait for their ``Fork``."""
        self._running: dict[int, int] = {}
        """Process id → number of its sample."""

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
        gc.freeze()  # a collection in a fork would copy all pages that it shares
        self._send(Loaded(loaded.descriptions, loaded.environment_kind))
        wakeup, wake = socket.socketpair()
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        poll.register(wakeup, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
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
                _kill_session(pid)

    def _begin(self, descriptor: int, loaded: Any) -> None:
        """Become the process of a sample."""
        status = 1
        try:
            template = os.getppid()
            os.setsid()
            end_with(template)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._connection.close()
            run_sample(socket.socket(fileno=descriptor), loaded)
            status = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _reap(self) -> None:
        while self._running:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            # Before it is reaped: until then no other process can get its id.
            _kill_session(ended.si_pid)
            _, status = os.waitpid(ended.si_pid, 0)
            number = self._running.pop(ended.si_pid, None)
            if number is not None:
                self._send(Ended(number, os.waitstatus_to_exitcode(status)))

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


def _kill_session(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # threads of the user's files must not keep the process alive
