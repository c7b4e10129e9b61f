"""Use resources servers of NeMo Gym: ``/seed_session``, one route for each tool, ``/verify`` for the reward.

The cookies of ``/seed_session`` name the sample's session. ``/verify`` gets the conversation as a response of OpenAI's
Responses API, as NeMo Gym's simple agent sends it.
"""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from plaudit_wire.errors import DataError, InfrastructureError
from plaudit_wire.messages import Prompt
from plaudit_workers.agent_processes.messages import EnvironmentServer, Tool
from plaudit_workers.agent_processes.sources.environments.environment import Messages, Observation, prompt_messages
from plaudit_workers.agent_processes.sources.environments.server import Routes, retry_until
from plaudit_workers.agent_processes.sources.tool import ToolAnswer

_NO_TOOLS = frozenset({"/seed_session", "/verify", "/aggregate_metrics", "/mcp"})
_PAUSE_SHARE = 0.8
_MOST_CHARACTERS_OF_A_PROBLEM = 500


class Route:
    """Call a tool of the server, in the session that ``server`` holds."""

    def __init__(self, server: ResourcesServer, description: Tool) -> None:
        self.description = description
        self._server = server

    async def call(self, arguments: dict[str, Any], create_arguments: dict[str, Any]) -> ToolAnswer:
        """Call the tool; the model reads the body of the response, whatever its status."""
        _, text = await self._server.post(f"/{self.description.name}", arguments)
        return ToolAnswer(text)


class ResourcesServer:
    """Hold a session with a resources server. ``source.arguments`` are added to each data row."""

    reads_text = False
    gives_reward = True

    def __init__(self, source: EnvironmentServer, routes: Routes) -> None:
        self._source = source
        schemas = [schema for path in sorted(routes.paths - _NO_TOOLS) if (schema := _schema(routes, path))]
        self.tools = [Route(self, Tool(schema["function"]["name"], schema, source.timeout_s)) for schema in schemas]
        self._schemas = schemas
        self._session: aiohttp.ClientSession | None = None
        self._row: dict[str, Any] = {}

    async def reset(self, prompt: Prompt) -> Messages | None:
        """Open a session for the data row: the columns of ``extra_info``, and ``responses_create_params``."""
        # Addresses without a name, such as 127.0.0.1, get cookies only in an unsafe jar.
        self._session = aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))
        written = {"input": prompt_messages(prompt), "tools": [_flat(schema) for schema in self._schemas]}
        self._row = {"responses_create_params": written, **prompt.extra_info, **self._source.arguments}
        await retry_until(_PAUSE_SHARE * self._source.timeout_s, lambda: self._post_checked("/seed_session", self._row))
        return None

    async def step(self, action: str) -> Observation:
        """Do nothing: the policy acts through tools."""
        raise NotImplementedError

    async def finish(self, completion: Messages) -> float | None:
        """Have the conversation verified."""
        verified = await self._post_checked("/verify", {**self._row, "response": _response(completion)})
        assert self._session is not None
        await self._session.close()
        reward: float | None = verified.get("reward")
        return reward

    async def attributes(self) -> dict[str, Any] | None:
        """Return None: the server holds the environment."""
        return None

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        """Return status and body of the response.

        Raises:
            InfrastructureError: the server cannot be reached.
        """
        assert self._session is not None
        try:
            async with self._session.post(f"{self._source.url.rstrip('/')}{path}", json=body) as response:
                return response.status, await response.text()
        except (aiohttp.ClientError, OSError) as error:
            raise InfrastructureError(f"{self._source.url}{path}: {type(error).__name__}: {error}") from error

    async def _post_checked(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        status, text = await self.post(path, body)
        problem = f"{self._source.url}{path} responded with status {status}: {text[:_MOST_CHARACTERS_OF_A_PROBLEM]}"
        if status >= 500 or status == 429:
            raise InfrastructureError(problem)
        if status >= 400:
            raise DataError(problem)
        content: dict[str, Any] = json.loads(text) if text else {}
        return content


def _schema(routes: Routes, path: str) -> dict[str, Any] | None:
    """Describe the tool at a path; None for a path that is no tool."""
    operation, name = routes.document["paths"][path].get("post"), path.removeprefix("/")
    if operation is None or "/" in name or "{" in name:
        return None
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    parameters = routes.resolved(content.get("schema") or {"type": "object", "properties": {}})
    description = operation.get("description") or operation.get("summary") or name
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _flat(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in the form of the Responses API."""
    return {"type": "function", "strict": False, **schema["function"]}


def _response(completion: Messages) -> dict[str, Any]:
    return {
        "id": "resp_plaudit",
        "created_at": 0,
        "model": "policy",
        "object": "response",
        "output": [item for number, message in enumerate(completion) for item in _items(message, number)],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


def _items(message: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Return a chat message as items of the Responses API."""
    content = message.get("content") or ""
    if message["role"] == "tool":
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": content}]
    if message["role"] != "assistant":
        return [{"type": "message", "role": message["role"], "content": content}]
    items: list[dict[str, Any]] = []
    calls = message.get("tool_calls") or []
    if content or not calls:
        text: dict[str, Any] = {"type": "output_text", "text": content, "annotations": []}
        items.append(
            {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed", "content": [text]}
        )
    for call in calls:
        function = call["function"]
        arguments = json.dumps(function["arguments"])
        items.append({"type": "function_call", "call_id": call["id"], "name": function["name"], "arguments": arguments})
    return items
