"""A server of a model whose answers a test writes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

OK = (200, {}, b'{"data": [{"probs": [1.5]}]}')
Reply = tuple[int, dict[str, str], bytes]


class ScriptedServer:
    """Speaks HTTP/1.1; each request but probes gets what ``answer`` makes of it. None: the connection is cut."""

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
