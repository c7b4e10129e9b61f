"""A private Redis for one run: password, append-only file, bounded memory, on a loopback or a given address."""

from __future__ import annotations

import ctypes
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

from plaudit_workers.process import RefusedError

_READY_WITHIN_S = 20.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class RedisServer:
    """Starts, supervises and ends one ``redis-server`` process.

    Args:
        folder: where its append-only file, configuration and log lie; a second start there loads what the first left.
        host: the address to listen on.
        max_memory_bytes: Redis refuses writes beyond it (``noeviction``); 0 = no limit.
        persistence: ``appendfsync`` policy.
    """

    def __init__(
        self, folder: Path, *, host: str = "127.0.0.1", max_memory_bytes: int = 0, persistence: str = "everysec"
    ) -> None:
        self.folder = folder.resolve()
        self.host = host
        self.port = free_port(host)
        self.password = secrets.token_urlsafe(24)
        self.max_memory_bytes = max_memory_bytes
        self.persistence = persistence
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Address without the password."""
        return f"redis://{self.host}:{self.port}/0"

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process else None

    def start(self) -> Self:
        """Starts the server and waits until it answers (with its file loaded).

        Raises:
            RefusedError: redis-server is not installed, or it ended at once (its log's last lines are in the message).
        """
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            raise RefusedError(
                "redis-server is not installed. Install it (Debian: apt-get install redis-server), or name a running "
                "Redis 7 in spec.transport.url"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        configuration = self.folder / "redis.conf"
        configuration.touch(mode=0o600)
        configuration.write_text(self._configuration())
        self._process = subprocess.Popen(
            [program, str(configuration)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C on the terminal is for the program that started it
            preexec_fn=die_with_parent,
        )
        self._wait_until_ready()
        return self

    def running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL: what a crash looks like."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """SIGTERM; the server writes its file and ends."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _configuration(self) -> str:
        return "\n".join(
            [
                f"bind {self.host}",
                f"port {self.port}",
                f"requirepass {self.password}",
                f'dir "{self.folder}"',
                f'logfile "{self.folder / "redis.log"}"',
                f'pidfile "{self.folder / "redis.pid"}"',
                "daemonize no",
                'save ""',
                "appendonly yes",
                f"appendfsync {self.persistence}",
                "maxmemory-policy noeviction",
                f"maxmemory {self.max_memory_bytes}",
                "",
            ]
        )

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _READY_WITHIN_S
        with redis.Redis(host=self.host, port=self.port, password=self.password) as client:
            while time.monotonic() < deadline and self._process.poll() is None:
                try:
                    client.ping()
                    return
                except redis.RedisError:
                    time.sleep(0.02)
        log = self.folder / "redis.log"
        tail = "\n".join(log.read_text().splitlines()[-5:]) if log.exists() else "(no log)"
        self.kill()
        raise RefusedError(
            f"redis-server did not start within {_READY_WITHIN_S:.0f} s in {self.folder}. Its log ends:\n{tail}"
        )

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()


def die_with_parent() -> None:
    """Runs in a child before it becomes its program: an owner that is killed outright leaves no server behind."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])
