"""Use OpenEnv servers: a session over the WebSocket ``/ws`` for each sample.

The policy acts through one tool, ``step``, whose parameters are those of the server's action (``GET /schema``); on a
server whose actions are MCP tools, through these tools. Rewards come with the steps and are added up.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

from plaudit_wire.errors import ConfigurationError, InfrastructureError
from plaudit_wire.messages import Prompt
from plaudit_workers.agent_processes.messages import EnvironmentServer, Tool
from plaudit_workers.agent_processes.sources.environments.environment import (
    Messages,
    Observation,
    prompt_messages,
    with_observation,
)
from plaudit_workers.agent_processes.sources.environments.server import Routes, ask_in_fork, get_json, retry_until
from plaudit_workers.agent_processes.sources.functions import to_text
from plaudit_workers.agent_processes.sources.tool import ToolAnswer

_PAUSE_SHARE = 0.8
"""Share of the time limit in which a full or unreachable server is asked again."""


class ServerAction:
    """Take the server's action, or one of its MCP tools, in the session that ``server`` holds."""

    def __init__(self, server: OpenEnvServer, description: Tool) -> None:
        self.description = description
        self._server = server

    async def call(self, arguments: dict[str, Any], create_arguments: dict[str, Any]) -> ToolAnswer:
        """Take one step."""
        action = arguments
        if self._server.has_mcp_tools:
            action = {"type": "call_tool", "tool_name": self.description.name, "arguments": arguments}
        data = await self._server.ask("step", action)
        reward = data.get("reward")
        text = _tool_text(data["observation"]) if self._server.has_mcp_tools else _text(data)
        return ToolAnswer(text, None if reward is None else float(reward), bool(data.get("done")))


class OpenEnvServer:
    """Hold a session with an OpenEnv server. ``source.arguments`` are passed to ``reset``."""

    reads_text = False
    gives_reward = False

    def __init__(self, source: EnvironmentServer, routes: Routes) -> None:
        self._source = source
        schemas, self.has_mcp_tools = ask_in_fork(source, lambda session: _actions(session, source.url.rstrip("/")))
        self.tools = [
            ServerAction(self, Tool(schema["function"]["name"], schema, source.timeout_s)) for schema in schemas
        ]
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._session: aiohttp.ClientSession | None = None
        self._one_at_a_time = asyncio.Lock()

    async def reset(self, prompt: Prompt) -> Messages | None:
        """Open a session and reset it with the prompt's seed and the data row; append the first observation."""
        arguments = {"seed": prompt.seed, **prompt.extra_info, **self._source.arguments}
        self._session = aiohttp.ClientSession()
        data = await retry_until(_PAUSE_SHARE * self._source.timeout_s, lambda: self._open(arguments))
        text = _text(data)
        return with_observation(prompt_messages(prompt), f"\n\n{text}") if text else None

    async def step(self, action: str) -> Observation:
        """Do nothing: the policy acts through tools."""
        raise NotImplementedError

    async def finish(self, completion: Messages) -> float | None:
        """Close the session; the rewards came with the steps."""
        if self._socket is not None:
            await self._socket.close()
        if self._session is not None:
            await self._session.close()
        return None

    async def attributes(self) -> dict[str, Any] | None:
        """Return None: the server holds the environment."""
        return None

    async def ask(self, method: str, data: dict[str, Any]) -> dict[str, Any]:
        """Send one message and return the data of its answer.

        Raises:
            InfrastructureError: the connection ended, or the server has no room for another session.
            ValueError: the server refused the message.
        """
        assert self._socket is not None
        async with self._one_at_a_time:
            return await _exchange(self._socket, method, data)

    async def _open(self, arguments: dict[str, Any]) -> dict[str, Any]:
        assert self._session is not None
        self._socket = await self._session.ws_connect(_socket_url(self._source.url))
        return await self.ask("reset", arguments)


async def _exchange(socket: aiohttp.ClientWebSocketResponse, method: str, data: dict[str, Any]) -> dict[str, Any]:
    try:
        await socket.send_json({"type": method, "data": data})
        message = await socket.receive()
    except (aiohttp.ClientError, OSError) as error:
        raise InfrastructureError(f"the connection to the environment ended: {error}") from error
    if message.type is not aiohttp.WSMsgType.TEXT:
        raise InfrastructureError("the environment closed the connection")
    answer = json.loads(message.data)
    if answer.get("type") != "error":
        content: dict[str, Any] = answer["data"]
        return content
    problem = answer["data"]
    text = f"{problem.get('message')} {json.dumps(problem['errors'], default=str) if 'errors' in problem else ''}"
    if problem.get("code") in ("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR"):
        raise InfrastructureError(text.strip())
    raise ValueError(text.strip())


async def _actions(session: aiohttp.ClientSession, url: str) -> tuple[list[dict[str, Any]], bool]:
    """Return the tools that the policy may call, and True if they are MCP tools."""
    schema = (await get_json(session, f"{url}/schema"))["action"]
    properties = {name: each for name, each in schema.get("properties", {}).items() if name != "metadata"}
    # MCP actions reach a server only where its action is one of them, or the base class, which has no field of its own.
    if {"tool_name", "arguments"} <= properties.keys() or properties.keys() <= {"type"}:
        listed = await _mcp_tools(session, url)
        if listed:
            return [_tool(t["name"], t.get("description") or "", _input_schema(t)) for t in listed], True
        if "type" in properties:
            raise ConfigurationError("the server takes MCP tool calls as actions but lists no tools")
    parameters = {
        **{key: each for key, each in schema.items() if key == "$defs"},
        "type": "object",
        "properties": properties,
        "required": [name for name in schema.get("required", []) if name in properties],
    }
    return [_tool("step", schema.get("description") or "Act in the environment.", parameters)], False


async def _mcp_tools(session: aiohttp.ClientSession, url: str) -> list[dict[str, Any]]:
    """Return the MCP tools that a server lists; [] where it has none."""
    async with session.ws_connect(_socket_url(url)) as socket:
        request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        response = await _exchange(socket, "mcp", request)
    tools: list[dict[str, Any]] = (response.get("result") or {}).get("tools") or []
    return tools


def _tool_text(observation: dict[str, Any]) -> str:
    """Return the result of an MCP tool as the model reads it: its data, or else the text of its content.

    Raises:
        ValueError: the tool raised, or the server refused the call.
    """
    if error := observation.get("error"):
        raise ValueError(error["message"])
    result = observation.get("result")
    if not isinstance(result, dict) or "content" not in result:
        return to_text(result)
    text = "\n".join(part["text"] for part in result["content"] if part.get("type") == "text")
    if result.get("is_error"):
        raise ValueError(text)
    data = result.get("data")
    return to_text(data) if data is not None else text


def _input_schema(tool: dict[str, Any]) -> dict[str, Any]:
    return tool.get("inputSchema") or tool.get("input_schema") or {"type": "object", "properties": {}}


def _tool(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _socket_url(url: str) -> str:
    return f"ws{url.rstrip('/').removeprefix('http')}/ws"


def _text(data: dict[str, Any]) -> str:
    """Return an observation as the model reads it: its only field as it is, several as JSON."""
    observation = {
        name: value
        for name, value in (data.get("observation") or {}).items()
        if name not in ("done", "reward", "metadata") and value is not None
    }
    if len(observation) == 1:
        return to_text(next(iter(observation.values())))
    return to_text(observation) if observation else ""
