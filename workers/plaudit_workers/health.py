"""Serve ``/healthz`` and ``/readyz`` of a process to the kubelet, and pages such as its series. Used by every role.

Plain HTTP/1.1 over asyncio, because every connection here has a deadline: uvicorn lets a client that never finishes its
request hold a connection for good, and anyone in the cluster can reach this port.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

_REQUEST_TIMEOUT_S = 5.0
_REASONS = {200: "OK", 404: "Not Found", 503: "Service Unavailable"}


class HealthServer:
    """Respond to ``/readyz`` with 200 or 503, to ``/healthz`` with 200, and to other paths with 404.

    Args:
        port: TCP port on all addresses, since the kubelet connects to the pod's; 0 = serve nothing.
        ready: returns True while the process can take work.
        pages: further pages of plain text, by path.
    """

    def __init__(
        self,
        port: int,
        ready: Callable[[], bool],
        pages: Mapping[str, Callable[[], bytes]] | None = None,
    ) -> None:
        self._port = port
        self._pages = dict(pages or {})
        self._answers: dict[str, Callable[[], bool]] = {"/readyz": ready, "/healthz": lambda: True}
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        if self._port:
            self._server = await asyncio.start_server(self._answer, "0.0.0.0", self._port)  # noqa: S104
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                path = _path(await reader.readuntil(b"\r\n\r\n"))
                page = self._pages.get(path)
                writer.write(_response(200, page()) if page else _response(self._status(path)))
                await writer.drain()
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    def _status(self, path: str) -> int:
        check = self._answers.get(path)
        if check is None:
            return 404
        return 200 if check() else 503


def _path(request: bytes) -> str:
    parts = request.split(b" ", 2)
    return parts[1].split(b"?", 1)[0].decode("latin-1") if len(parts) == 3 else ""


def _response(status: int, page: bytes | None = None) -> bytes:
    body = f"{_REASONS[status]}\n".encode() if page is None else page
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: text/plain; version=0.0.4\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
