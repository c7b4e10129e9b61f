"""Tools of an MCP server, reached over HTTP or started as a command, through the official client (package ``mcp``).

The process of a sample opens its own session with its first call, so a server's state belongs to one sample. The list
of tools is read once, in a process of its own: the template, which forks, must not have threads or connections.
"""

from __future__ import annotations

import asyncio
from typing import Any

from plaudit_reward.errors import ConfigurationError
from plaudit_workers.agent_processes.messages import McpServer, Tool
from plaudit_workers.agent_processes.sources.in_fork import first_cause, in_fork
from plaudit_workers.agent_processes.sources.tool import Answer

_LIST_WITHIN_S = 60.0


class McpSession:
    """One sample's session with a server, opened by the first call.

    Args:
        server: its address.
    """

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._opened: asyncio.Future[Any] | None = None
        self._task: asyncio.Task[None] | None = None

    async def client(self) -> Any:
        """Return the connected client."""
        if self._opened is None:
            self._opened = asyncio.get_running_loop().create_future()
            # Its context belongs to one task for as long as the process lives.
            self._task = asyncio.get_running_loop().create_task(self._hold(self._opened))
        return await asyncio.shield(self._opened)

    async def _hold(self, opened: asyncio.Future[Any]) -> None:
        try:
            async with _client(self._server) as client:
                opened.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:
            if not opened.done():
                opened.set_exception(RuntimeError(f"MCP server {_address(self._server)}: {first_cause(error)}"))


class McpTool:
    """A tool of an MCP server.

    Args:
        session: of the server.
        description: as the model sees it.
    """

    def __init__(self, session: McpSession, description: Tool) -> None:
        self.description = description
        self._session = session

    async def call(self, arguments: dict[str, Any], create_arguments: dict[str, Any]) -> Answer:
        """Call the tool on the server."""
        client = await self._session.client()
        result = await client.call_tool(self.description.name, arguments)
        text = "\n".join(str(block.text) for block in result.content if getattr(block, "text", None) is not None)
        if getattr(result, "is_error", False) or getattr(result, "isError", False):
            raise RuntimeError(text or "the server reported an error")
        return Answer(text)


def load_mcp_tools(source: McpServer) -> list[McpTool]:
    """List the tools of a server.

    Raises:
        ConfigurationError: the server cannot be reached or started.
    """
    session = McpSession(source)
    return [McpTool(session, Tool(_name(schema), schema, source.timeout_s)) for schema in _listed(source)]


def _listed(source: McpServer) -> list[dict[str, Any]]:
    """Return the schemas of the server's tools."""
    try:
        return in_fork(lambda: asyncio.run(_list(source)))
    except ConfigurationError as error:
        raise ConfigurationError(f"MCP server {_address(source)} cannot be used: {error}") from error


async def _list(source: McpServer) -> list[dict[str, Any]]:
    async with asyncio.timeout(_LIST_WITHIN_S), _client(source) as client:
        listed = await client.list_tools()
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": getattr(tool, "input_schema", None) or getattr(tool, "inputSchema", None) or {},
            },
        }
        for tool in listed.tools
    ]


def _client(server: McpServer) -> Any:
    from mcp import Client, StdioServerParameters

    if server.url:
        return Client(server.url)
    return Client(StdioServerParameters(command=server.command[0], args=list(server.command[1:])))


def _name(schema: dict[str, Any]) -> str:
    return str(schema["function"]["name"])


def _address(server: McpServer) -> str:
    return server.url or " ".join(server.command)
