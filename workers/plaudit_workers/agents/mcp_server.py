"""Run tools of an MCP server, reached over HTTP or started as a command, through the official client (``mcp``).

The process of a sample opens its own session with its first call, so a server's state belongs to one sample. The list
of tools is read once, in a process of its own: the template, which forks, must not have threads or connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from plaudit_wire.errors import ConfigurationError, InfrastructureError
from plaudit_wire.frames import how_ended
from plaudit_wire.plain import PlainDataError, json_value, mended_json
from plaudit_wire.printable import printable, shown
from plaudit_workers.agents.functions import LoadedTool, ToolAnswer, first_cause, function_schema, in_fork
from plaudit_workers.agents.messages import McpServer, Tool

_LIST_WITHIN_S = 60.0
_END_WITHIN_S = 2.0
_STATUS_WITHIN_S = 0.5
_MOST_TOOLS = 4096
_SHOWN_BYTES = 200
_KEPT_BYTES = 1000


def load_mcp_tools(source: McpServer) -> list[LoadedTool]:
    """List the tools of a server; raise ``ConfigurationError`` if it cannot be reached or started."""
    # Imported before the fork: in each sample's process it would take a second.
    import mcp.client.stdio
    import mcp.client.streamable_http  # noqa: F401

    # The client logs a server's faults with tracebacks; those that matter end a call by name.
    for logger in ("mcp", "client"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    session = _McpSession(source)
    return [session.tool(Tool.of(schema, source.timeout_s)) for schema in _listed(source)]


def _listed(source: McpServer) -> list[dict[str, Any]]:
    """Return the schemas of the server's tools."""
    try:
        return in_fork(lambda: asyncio.run(_list(source)))
    except ConfigurationError as error:
        remedy = ". Check mcp.url, and whether the server needs mcp.headers" if source.url else ""
        raise ConfigurationError(f"MCP server {_address(source)} cannot be used: {error}{remedy}") from error


async def _list(source: McpServer) -> list[dict[str, Any]]:
    try:
        async with asyncio.timeout(_LIST_WITHIN_S), _client(source, []) as client:
            tools = await _all_tools(client)
    except TimeoutError:
        raise ConfigurationError(f"it did not list its tools within {_LIST_WITHIN_S:g} s") from None
    return [function_schema(tool.name, tool.description or "", tool.input_schema or {}) for tool in tools]


async def _all_tools(client: Any) -> list[Any]:
    """Return the tools of all pages."""
    from pydantic import ValidationError

    tools: list[Any] = []
    cursor: str | None = None
    while True:
        try:
            page = await client.list_tools(cursor=cursor)
        except ValidationError as error:
            raise ConfigurationError(f"it sent no list of tools: {_problem(error)}") from None
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            return tools
        if len(tools) > _MOST_TOOLS or not page.tools:
            raise ConfigurationError(f"its list of tools has no end: {len(tools)} tools so far")


def _problem(error: Any) -> str:
    """Return the first of pydantic's errors as one line."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}, it is {shown(first['input'])}"


class _McpSession:
    """Hold one sample's session with a server, opened by the first call.

    A session that ends, with the server or by its word, fails the call that notices it; the next call opens another
    one.
    """

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._opened: asyncio.Future[Any] | None = None
        self._holding: asyncio.Task[None] | None = None
        self._reasons: list[str] = []
        """Why the session ends, from the moment on that it does."""

    def tool(self, description: Tool) -> LoadedTool:
        """Return a tool of the server, called in this session."""

        async def call(arguments: dict[str, Any], _: dict[str, Any]) -> ToolAnswer:
            result = await self._call_tool(description.name, arguments)
            text = _result_text(result)
            if result.is_error:
                raise RuntimeError(text or "the server reported an error")
            return ToolAnswer(text)

        return LoadedTool(description, call)

    async def _call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        """Return the result of a tool."""
        from mcp import MCPError
        from pydantic import ValidationError

        if self._opened is None or self._holding is None:
            self._opened = asyncio.get_running_loop().create_future()
            # The client's context belongs to one task for as long as the session lives.
            self._reasons = []
            self._holding = asyncio.get_running_loop().create_task(self._hold(self._opened, self._reasons))
            self._holding.add_done_callback(lambda held: held.cancelled() or held.exception())  # nobody may ask for it
        holding, reasons = self._holding, self._reasons
        calling = asyncio.ensure_future(_call(self._opened, name, arguments))
        await asyncio.wait({holding, calling}, return_when=asyncio.FIRST_COMPLETED)
        if calling.done() and not calling.cancelled():
            try:
                return calling.result()
            except ValidationError as error:
                raise ValueError(f"MCP server {_address(self._server)} sent no result: {_problem(error)}") from None
            except MCPError as error:
                if not _ended_by(error):
                    raise
                if not reasons:  # else it ends by itself, and cleans up after a process first
                    holding.cancel()
                    await asyncio.wait({holding})
        calling.cancel()
        await asyncio.wait({calling})
        if self._holding is holding:
            self._opened = self._holding = None
        cause = holding.exception() if holding.done() and not holding.cancelled() else None
        reason = first_cause(cause) if cause is not None else "it ended the session"
        raise InfrastructureError(f"MCP server {_address(self._server)}: {reasons[0] if reasons else reason}")

    async def _hold(self, opened: asyncio.Future[Any], reasons: list[str]) -> None:
        async with _client(self._server, reasons) as client:
            opened.set_result(client)
            await asyncio.Event().wait()


async def _call(opened: asyncio.Future[Any], name: str, arguments: dict[str, Any]) -> Any:
    client = await asyncio.shield(opened)
    return await client.call_tool(name, arguments)


def _ended_by(error: Any) -> bool:
    """Return True if the error says that the session no longer exists, and not that a request is wrong."""
    from mcp.client.streamable_http import CONNECTION_CLOSED

    return bool(error.code == CONNECTION_CLOSED) or error.message == "Session terminated"


def _result_text(result: Any) -> str:
    """Return a result as text: contents of other kinds by their type and size, structured content as JSON."""
    blocks = [_block_text(block) for block in result.content]
    if not blocks and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(blocks)


def _block_text(block: Any) -> str:
    inner = getattr(block, "resource", block)
    text = getattr(inner, "text", None)
    if text is not None:
        return str(text)
    if block.type == "resource_link":
        return str(block.uri)
    data = str(getattr(inner, "data", None) or getattr(inner, "blob", ""))
    return f"[{inner.mime_type or block.type}, {len(data) * 3 // 4} bytes]"


@contextlib.asynccontextmanager
async def _client(server: McpServer, reasons: list[str]) -> AsyncIterator[Any]:
    """Open a session; when it ends by itself, ``reasons`` gets the reason before its calls fail."""
    from mcp import Client
    from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

    if not server.url:
        async with Client(_started(server.command, reasons)) as client:
            yield client
        return
    async with (
        create_mcp_http_client(headers={"Accept-Encoding": "identity", **server.headers}) as http,
        Client(streamable_http_client(server.url, http_client=http)) as client,
    ):
        http.event_hooks = {"response": [_bound]}
        yield client


@contextlib.asynccontextmanager
async def _started(command: Sequence[str], reasons: list[str]) -> AsyncIterator[tuple[Any, Any]]:
    """Start a server and exchange lines with it, as ``mcp.client.stdio`` does, which holds a line of any length."""
    import anyio
    from mcp.client.stdio import get_default_environment

    received, read = anyio.create_memory_object_stream[Any](0)
    write, sent = anyio.create_memory_object_stream[Any](0)

    async def noting(work: Callable[[Any, Any, _Errors], Awaitable[None]], stream: Any) -> None:
        try:
            await work(process, stream, errors)
        except InfrastructureError as error:
            reasons.append(str(error))
            raise

    process = await anyio.open_process(command, env=get_default_environment(), start_new_session=True)
    errors = _Errors(process)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(errors.pass_on)
            tasks.start_soon(noting, _read_lines, received)
            tasks.start_soon(noting, _write_lines, sent)
            yield read, write
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            # A server ends when its input does.
            await process.stdin.aclose()  # type: ignore[union-attr]
            with anyio.move_on_after(_END_WITHIN_S):
                await process.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.aclose()


class _Errors:
    """Hold the end of what a server writes to its standard error, which goes on to ours."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self._end = b""
        self._has_ended = asyncio.Event()

    async def pass_on(self) -> None:
        """Read until the server and all that it started have closed it."""
        async for part in self._process.stderr:
            with contextlib.suppress(OSError):
                os.write(2, part)
            self._end = (self._end + part)[-_KEPT_BYTES:]
        self._has_ended.set()

    async def last_line(self) -> str:
        """Return the last line that is not blank; empty without one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STATUS_WITHIN_S):
                await self._has_ended.wait()
        lines = self._end.decode(errors="replace").split("\n")
        return next((printable(line.strip()) for line in reversed(lines) if line.strip()), "")


async def _read_lines(process: Any, received: Any, errors: _Errors) -> None:
    """Read the server's messages.

    Raise ``InfrastructureError`` at a line that is too long to be held, at an answer that is no message, which nobody
    could wait for, and when there are no more. Other lines, such as what a server prints, are left out.
    """
    import anyio
    from anyio.streams.buffered import BufferedByteReceiveStream
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    from plaudit_reward.http import MAX_RESPONSE_BYTES

    lines = BufferedByteReceiveStream(process.stdout)
    with received, contextlib.suppress(anyio.BrokenResourceError):  # the session has ended
        while True:
            try:
                line = await lines.receive_until(b"\n", MAX_RESPONSE_BYTES)
            except anyio.DelimiterNotFound as error:
                raise InfrastructureError(f"a line of its output is longer than {MAX_RESPONSE_BYTES} bytes") from error
            except (anyio.IncompleteRead, OSError):
                raise await _gone(process, errors, "it closed its standard output") from None
            try:
                message = SessionMessage(jsonrpc_message_adapter.validate_json(mended_json(line), by_name=False))
            except ValueError:
                if _is_answer(line):
                    said = shown(line[:_SHOWN_BYTES].decode(errors="replace"))
                    raise InfrastructureError(f"it sent an answer that is no message of MCP: {said}") from None
            else:
                await received.send(message)


def _is_answer(line: bytes) -> bool:
    """Return True if a line was meant as an answer of JSON-RPC, and not as a notification or for a person."""
    if b'"jsonrpc"' not in line:
        return False
    try:
        value = json_value(line)
    except PlainDataError:
        return line.lstrip().startswith(b"{")
    return isinstance(value, dict) and "method" not in value


async def _gone(process: Any, errors: _Errors, otherwise: str) -> InfrastructureError:
    """Return an error that says how a server's process ended, or ``otherwise`` if it goes on, and its last words."""
    import anyio

    reason = otherwise
    with anyio.move_on_after(_STATUS_WITHIN_S):
        reason = f"its process {how_ended(await process.wait())}"
    last = await errors.last_line()
    return InfrastructureError(f"{reason}: {last}" if last else reason)


async def _write_lines(process: Any, sent: Any, errors: _Errors) -> None:
    import anyio

    try:
        async for message in sent:
            line = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            await process.stdin.send(f"{line}\n".encode())
    except (anyio.BrokenResourceError, OSError):
        raise await _gone(process, errors, "it no longer reads its standard input") from None


async def _bound(response: Any) -> None:
    """Bound the body of a response; the client itself bounds each event of a stream."""
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        response.stream = _bounded_stream(response)


def _bounded_stream(response: Any) -> Any:
    import httpx2

    from plaudit_reward.http import MAX_RESPONSE_BYTES, ConnectionLostError, ResponseTooLargeError  # imports aiohttp

    class BoundedStream(httpx2.AsyncByteStream):
        """Read a body; raise ``ResponseTooLargeError`` beyond the limit, ``ConnectionLostError`` if compressed."""

        async def __aiter__(self) -> AsyncIterator[bytes]:
            if response.headers.get("content-encoding", "identity") != "identity":
                raise ConnectionLostError("the response is compressed")
            size = 0
            async for part in stream:
                size += len(part)
                if size > MAX_RESPONSE_BYTES:
                    raise ResponseTooLargeError(f"the response is longer than {MAX_RESPONSE_BYTES} bytes")
                yield part

        async def aclose(self) -> None:
            await stream.aclose()

    stream = response.stream
    return BoundedStream()


def _address(server: McpServer) -> str:
    return server.url or " ".join(server.command)
