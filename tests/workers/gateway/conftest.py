"""A gateway before a scoring service with real workers, on the session's Redis, over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from plaudit_client import RewardClient
from plaudit_wire.redis import RedisAddress
from plaudit_workers.job_start import service_of
from plaudit_workers.launch.redis import free_port
from plaudit_workers.service.callers import Callers, Limits
from plaudit_workers.service.gateway import GatewaySettings, application, listen, serve_on
from plaudit_workers.service.tokens import Tokens
from plaudit_workers.stream.transport import Transport
from scoring_service import Running, start_service

__all__ = ["start_service"]

TOKEN = "token-of-one-caller"
OTHER = "token-of-another-caller"


@dataclass(frozen=True)
class Gateway:
    """A gateway and how to reach it."""

    url: str

    def client(self, **arguments: Any) -> RewardClient:
        return RewardClient(self.url, TOKEN, **arguments)

    def http(self, token: str = TOKEN) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {token}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, verify=False, timeout=30.0)


StartGateway = Callable[..., AbstractAsyncContextManager[Gateway]]


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """A folder with the tokens of two callers."""
    folder = tmp_path / "tokens"
    folder.mkdir()
    (folder / "one").write_text(TOKEN + "\n")
    (folder / "other").write_text(OTHER + "\n")
    return folder


@pytest.fixture
def start_gateway(tokens: Path) -> StartGateway:
    """A gateway of a service, in this process."""

    @asynccontextmanager
    async def start(
        service: Running, limits: Limits | None = None, certificate: str = "", key: str = "", **offer: Any
    ) -> AsyncIterator[Gateway]:
        own = GatewaySettings("127.0.0.1", free_port(), tokens, certificate, key)
        transport = Transport(RedisAddress(service.server.url, service.server.password), service.run)
        offered = service_of(service.job)
        offered = type(offered)(**{name: getattr(offered, name) for name in FIELDS} | offer)
        callers = Callers(transport, offered, limits)
        stop = asyncio.Event()
        app = application(service.job, service.run, callers, Tokens(tokens))
        serving = asyncio.create_task(serve_on(app, callers, listen(own), own, stop))
        await callers.is_running.wait()
        try:
            yield Gateway(f"{'https' if certificate else 'http'}://127.0.0.1:{own.port}")
        finally:
            stop.set()
            await serving
            await app.close()
            await transport.close()

    return start


FIELDS = ("job", "scorers", "group_scorers", "group_deadline_s", "room")


@dataclass
class GatewayProcess:
    """A gateway in a process of its own, to be killed."""

    service: Running
    job: Path
    tokens: Path
    port: int
    health_port: int
    leaves_s: int = 0
    without: str = ""
    """A module that the process finds broken, as in an environment without it."""
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {
            **os.environ,
            "PLAUDIT_JOB": str(self.job),
            "PLAUDIT_RUN": self.service.run,
            "PLAUDIT_RUN_FOLDER": str(self.job.parent),
            "PLAUDIT_REDIS_URL": self.service.server.url,
            "PLAUDIT_REDIS_PASSWORD": self.service.server.password,
            "PLAUDIT_GATEWAY_PORT": str(self.port),
            "PLAUDIT_GATEWAY_TOKENS": str(self.tokens),
            "PLAUDIT_HEALTH_PORT": str(self.health_port),
            "PLAUDIT_GATEWAY_LEAVES_S": str(self.leaves_s),
        }
        if self.without:
            hidden = self.job.parent / "hidden"
            hidden.mkdir(exist_ok=True)
            (hidden / f"{self.without}.py").write_text("raise ImportError")
            environment["PYTHONPATH"] = f"{hidden}:{environment.get('PYTHONPATH', '')}"
        self.process = subprocess.Popen([sys.executable, "-m", "plaudit_workers.gateway"], env=environment)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def terminate(self) -> None:
        assert self.process is not None
        self.process.terminate()

    def http(self) -> httpx.AsyncClient:
        return Gateway(f"http://127.0.0.1:{self.port}").http()

    async def is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return (await self._page("/readyz")).status_code == 200
        return False

    async def has_series(self, line: str) -> bool:
        return line in (await self._page("/metrics")).text

    async def _page(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient() as http:
            return await http.get(f"http://127.0.0.1:{self.health_port}{path}")


@pytest.fixture
def gateway_process(tmp_path: Path, tokens: Path) -> Callable[..., AbstractAsyncContextManager[GatewayProcess]]:
    """A gateway of a service, in a process of its own."""

    @asynccontextmanager
    async def start(service: Running, leaves_s: int = 0, without: str = "") -> AsyncIterator[GatewayProcess]:
        gateway = GatewayProcess(service, tmp_path / "job.yaml", tokens, free_port(), free_port(), leaves_s, without)
        gateway.start()
        try:
            yield gateway
        finally:
            gateway.kill()

    return start
