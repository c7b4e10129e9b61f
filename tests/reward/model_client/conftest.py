"""A server whose answers a test writes, and a scorer over several of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from plaudit_reward.model_client.scorer import ModelScorer

OK = (200, {}, b'{"data": [{"probs": [1.5]}]}')
Reply = tuple[int, dict[str, str], bytes]


class ScriptedServer:
    """Speaks HTTP/1.1; each request to ``/classify`` gets what ``answer`` makes of it. None: the connection is cut."""

    def __init__(self) -> None:
        self.healthy = True
        self.reply: Reply | None = OK
        self.answer: Callable[[bytes], Awaitable[Reply | None]] = self._reply
        self.bodies: list[bytes] = []
        self.probes = 0
        self.port = 0
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _reply(self, body: bytes) -> Reply | None:
        return self.reply

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
            body = await reader.readexactly(int(length[0])) if length else b""
            if b"/health" in head.split(b"\r\n")[0]:
                self.probes += 1
                reply: Reply | None = (200 if self.healthy else 503, {}, b"")
            else:
                self.bodies.append(body)
                reply = await self.answer(body)
            if reply is not None:
                status, headers, content = reply
                lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(content)}", "Connection: close"]
                lines += [f"{name}: {value}" for name, value in headers.items()]
                writer.write("\r\n".join([*lines, "", ""]).encode() + content)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def servers() -> AsyncIterator[Callable[[int], Awaitable[list[ScriptedServer]]]]:
    """Starts so many servers."""
    started: list[ScriptedServer] = []

    async def start(count: int) -> list[ScriptedServer]:
        started.extend(ScriptedServer() for _ in range(count))
        for server in started:
            await server.start()
        return started

    yield start
    for server in started:
        await server.stop()


@pytest.fixture
async def open_scorer() -> AsyncIterator[Callable[..., Awaitable[ModelScorer]]]:
    """A scorer over places; waits until it has a healthy server unless told otherwise."""
    scorers: list[ModelScorer] = []

    async def make(places: list[str], *, wait: bool = True, **options: Any) -> ModelScorer:
        scorer = ModelScorer("rm", places, **options)
        scorers.append(scorer)
        await scorer.open()
        while wait and not scorer.room():
            await asyncio.sleep(0.01)
        return scorer

    yield make
    for scorer in scorers:
        await scorer.close()
