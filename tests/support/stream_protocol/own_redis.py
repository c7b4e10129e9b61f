"""A redis-server of a test's own, with lines of configuration that ``RedisServer`` does not write."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

from plaudit_sandbox.lifetime import end_program_with_us
from plaudit_workers.launch.redis import free_port


class OwnRedis:
    """Runs while the context lasts; use ``port`` in the lines as ``{port}``."""

    def __init__(self, folder: Path, *lines: str) -> None:
        self.port = free_port()
        self._file = folder / f"redis-{self.port}.conf"
        self._log = self._file.with_suffix(".log")
        always = ("bind 127.0.0.1", 'save ""', "appendonly no", "maxmemory 64mb", f'dir "{folder}"')
        self._file.write_text("\n".join([*always, *lines]).replace("{port}", str(self.port)))
        self._process: subprocess.Popen[bytes]

    def __enter__(self) -> OwnRedis:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["redis-server", str(self._file)], stdout=log, stderr=log, preexec_fn=end_program_with_us()
            )
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and self._process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return self
            time.sleep(0.02)
        self._process.kill()
        raise RuntimeError(self._log.read_text())

    def kill(self) -> None:
        """End it by SIGKILL; ``with`` starts it again in the same folder."""
        self._process.kill()
        self._process.wait()

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
