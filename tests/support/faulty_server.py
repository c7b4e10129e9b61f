"""An HTTP server that misbehaves on demand: plain asyncio, to cut, stall and corrupt below HTTP.

It serves chat completions, or the paths that it is given.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


def completion(content: Any = "score: 4", **changes: Any) -> dict[str, Any]:
    """The body of a good answer."""
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    return {"id": "1", "object": "chat.completion", "model": "big", "choices": [choice], "usage": usage, **changes}


@dataclass
class Reply:
    """The reply to one request."""

    status: int = 200
    body: Any = field(default_factory=completion)
    """Bytes are sent as they are, anything else as JSON."""
    headers: Mapping[str, str] = field(default_factory=dict)
    after_s: float = 0.0
    drip_s: float = 0.0
    """Seconds between the bytes of the body."""
    cut: str = ""
    """``before`` the first byte or in the ``middle`` of the body."""


@dataclass
class Request:
    """A received request."""

    arrived: float
    """Monotonic seconds."""
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def prompt(self) -> str:
        return str(self.body["messages"][0]["content"])


class FaultyServer:
    """Answer each request with the result of ``reply``; record all requests."""

    def __init__(self, *paths: str) -> None:
        self._paths = paths or ("/v1/chat/completions",)
        self.requests: list[Request] = []
        self.most_at_a_time = 0
        self.reply: Callable[[Request, int], Reply] = lambda request, number: Reply()
        self._at_a_time = 0
        self._server: asyncio.Server | None = None
        self._port = 0
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> FaultyServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen; after ``stop``, on the same port again."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse connections and cut open ones."""
        if self._server is not None:
            self._server.close()
            for writer in self._writers:
                writer.transport.abort()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        assert head[0] in [f"POST {path} HTTP/1.1" for path in self._paths], head[0]
        request = Request(time.monotonic(), headers, body)
        self.requests.append(request)
        self._at_a_time += 1
        self.most_at_a_time = max(self.most_at_a_time, self._at_a_time)
        try:
            return await self._answer(self.reply(request, len(self.requests)), writer)
        finally:
            self._at_a_time -= 1

    async def _answer(self, reply: Reply, writer: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(reply.after_s)
        if reply.cut == "before":
            return False
        body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        lines = {"content-type": "application/json", "content-length": str(len(body)), **reply.headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        writer.write(f"HTTP/1.1 {reply.status} Whatever\r\n{head}\r\n".encode())
        if reply.cut == "middle":
            writer.write(body[: len(body) // 2])
            await writer.drain()
            return False
        if reply.drip_s:
            for byte in body:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(reply.drip_s)
        else:
            writer.write(body)
        await writer.drain()
        return True
