"""A network between processes and a server that stalls, is slow, or cuts connections and refuses new ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from types import TracebackType


class BadNetwork:
    """Forward connections to a port of this machine while the context lasts.

    Attributes:
        port: the port to connect to.
        on_message: called with each message of a client, before it is forwarded.
        late_s: returns the seconds by which the next reply is late.
    """

    def __init__(self, port: int) -> None:
        self.port = 0
        self.on_message: Callable[[bytes], None] = lambda data: None
        self.late_s: Callable[[], float] = lambda: 0.0
        self._target = port
        self._flows = asyncio.Event()
        self._flows.set()
        self._refuses = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> BadNetwork:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._server.close()
        self._refuses = True  # also a connection that was accepted and whose task has yet to begin
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def stall(self, seconds: float) -> None:
        """Forward nothing for a while; connections stay open, as behind a node that is lost."""
        self._flows.clear()
        await asyncio.sleep(seconds)
        self._flows.set()

    def cut(self) -> None:
        """End every connection and refuse new ones until ``restore``."""
        self._refuses = True
        for writer in self._writers:
            writer.transport.abort()

    def restore(self) -> None:
        """Accept connections again."""
        self._refuses = False

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._refuses:
            writer.transport.abort()
            return
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self._flows.wait()
            upstream, target = await asyncio.open_connection("127.0.0.1", self._target)
            self._writers |= {writer, target}
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._forward(reader, target, self._noticed))
                    tasks.create_task(self._forward(upstream, writer, self._delayed))
            except* OSError:
                pass
            finally:
                self._writers -= {writer, target}
                target.close()
        writer.close()

    async def _noticed(self, data: bytes) -> None:
        self.on_message(data)

    async def _delayed(self, data: bytes) -> None:
        if (late_s := self.late_s()) > 0:
            await asyncio.sleep(late_s)

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, before: Callable[[bytes], Awaitable[None]]
    ) -> None:
        while data := await reader.read(1 << 16):
            await before(data)
            await self._flows.wait()
            writer.write(data)
            await writer.drain()
        writer.close()
