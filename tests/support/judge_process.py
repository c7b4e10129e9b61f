"""The judge of an example as a process of its own, which a test starts and kills."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from plaudit_workers.launch.redis import free_port


class JudgeProcess:
    """Run a judge's script on a free port, with further arguments."""

    def __init__(self, script: Path, *arguments: str) -> None:
        self.port = free_port()
        self._command = [sys.executable, str(script), "--port", str(self.port), *arguments]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start it, and wait until it listens."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert "judging at" in self._process.stdout.readline()

    def kill(self) -> None:
        """Kill it, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
