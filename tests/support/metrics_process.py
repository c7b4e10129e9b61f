"""The metrics service of a run as a process."""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from plaudit_workers.launch.redis import RedisServer, free_port

_TLS = ssl.create_default_context()
"""Nothing here uses it, but each client would read all certificates anew, while a network of the test waits."""


class MetricsProcess:
    """The metrics service as a process that can be killed.

    Args:
        server: the run's Redis.
        run: id of the run.
        folder: the run's folder.
        settings: further variables of its environment.
    """

    def __init__(self, server: RedisServer, run: str, folder: Path, settings: Mapping[str, str] = {}) -> None:
        self.port = free_port()
        self._environment = {
            **{name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ},
            "PLAUDIT_RUN": run,
            "PLAUDIT_REDIS_URL": server.url,
            "PLAUDIT_REDIS_PASSWORD": server.password,
            "PLAUDIT_METRICS_PORT": str(self.port),
            "PLAUDIT_RUN_FOLDER": str(folder),
            "PLAUDIT_LOG_FILE": str(folder / "metrics.log"),
            **settings,
        }
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it and wait until it responds."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "plaudit_metrics", env=self._environment
        )
        async with asyncio.timeout(240):
            while not await self._answers():
                await asyncio.sleep(0.05)

    async def _answers(self) -> bool:
        try:
            await self.get("steps")
        except httpx.TransportError:
            return False
        return True

    @property
    def url(self) -> str:
        """Return its address."""
        return f"http://127.0.0.1:{self.port}"

    async def kill(self) -> None:
        """Kill it, if it runs."""
        if self._process is not None:
            self._process.kill()
            await self._process.wait()
            self._process = None

    async def get(self, path: str) -> Any:
        """Return a response of its API."""
        async with httpx.AsyncClient(timeout=30, verify=_TLS) as client:
            return (await client.get(f"{self.url}/api/v1/{path}")).json()
