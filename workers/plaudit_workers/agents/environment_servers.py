"""Use environments behind a URL, OpenEnv servers and resources servers of NeMo Gym, from the process of a sample.

Imports aiohttp, so ``load`` imports this module late. A server is recognised by its routes, and asked for its tools in
a fork. On all kinds the policy acts by tool calls; ``open_reward`` has the third kind. What a server sends is bounded
like the answers of scorers.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
from yarl import URL

from plaudit_reward.endpoint.shapes import OPEN_REWARD_ROUTE, refuse_masked
from plaudit_reward.http import bounded_body
from plaudit_wire.backoff import backoff_s
from plaudit_wire.errors import ConfigurationError, DataError, InfrastructureError
from plaudit_wire.messages import Prompt
from plaudit_wire.plain import MOST_LEVELS
from plaudit_wire.printable import shown
from plaudit_workers.agents.environment import Environment, Messages, with_observation
from plaudit_workers.agents.functions import (
    LoadedTool,
    ToolAnswer,
    finite,
    first_cause,
    function_schema,
    in_fork,
    to_text,
)
from plaudit_workers.agents.messages import EnvironmentServer, Tool, prompt_messages

_ASK_WITHIN_S = 30.0
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_RESET_SHARE = 0.8
"""Of the limit of a call, in which a server that is unreachable or full is asked for a session again."""
_NO_TOOLS = frozenset({"/seed_session", "/close_session", "/verify", "/aggregate_metrics", "/mcp"})
_MOST_CHARACTERS_OF_A_PROBLEM = 500
_MOST_PARTS = 200_000
"""Of the schemas of all tools together: references within references grow a short document without bound."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Routes:
    """Hold the OpenAPI description of a server (FastAPI's ``/openapi.json``)."""

    document: dict[str, Any]
    _parts: Iterator[int] = field(default_factory=itertools.count)

    @property
    def paths(self) -> frozenset[str]:
        """Return the paths."""
        return frozenset(self.document.get("paths", {}))

    def resolved(self, schema: Any, within: tuple[str, ...] = (), level: int = 0) -> Any:
        """Return a schema with its references replaced by what they refer to; inside of itself, a type is any value.

        Raises ``ConfigurationError`` for one that grows beyond all bounds.
        """
        if level > MOST_LEVELS or next(self._parts) > _MOST_PARTS:
            raise ConfigurationError(
                f"the schemas of its tools, with the types that they refer to, are nested more than {MOST_LEVELS} "
                f"levels deep or have more than {_MOST_PARTS} parts: describe the bodies of its routes by fewer types"
            )
        if isinstance(schema, list):
            return [self.resolved(item, within, level + 1) for item in schema]
        if not isinstance(schema, dict):
            return schema
        if "$ref" in schema:
            name = str(schema["$ref"]).rpartition("/")[2]
            found = members(self.document, "components", "schemas").get(name, {})
            return {} if name in within else self.resolved(found, (*within, name), level + 1)
        return {key: self.resolved(value, within, level + 1) for key, value in schema.items()}


def members(content: Any, *path: str) -> dict[str, Any]:
    """Return the JSON object at a path of names; an empty one where there is none."""
    for name in path:
        content = content.get(name) if isinstance(content, dict) else None
    return content if isinstance(content, dict) else {}


def routes_of(source: EnvironmentServer) -> Routes:
    """Read the routes of a server; raise ``ConfigurationError`` if it is unreachable or does not describe itself.

    A server of the Open Reward Standard may be of any language, without ``/openapi.json``: it lists its environments.
    """
    url = source.url.rstrip("/")

    async def document(session: aiohttp.ClientSession) -> Any:
        try:
            return await get_json(session, f"{url}/openapi.json")
        except DataError:
            await get_json(session, f"{url}{OPEN_REWARD_ROUTE}")
            return {"paths": {OPEN_REWARD_ROUTE: {}}}

    found = ask_in_fork(source, document)
    if not isinstance(found, dict) or not isinstance(found.get("paths"), dict):
        raise ConfigurationError(
            f"the environment's server {source.url} sent no routes as /openapi.json: {shown(found)}"
        )
    return Routes(found)


def open_session(**settings: Any) -> aiohttp.ClientSession:
    """Open connections whose responses ``bounded_body`` can bound, and whose headers reach one server alone.

    They are not compressed, and a redirect to another origin, which would get the session's headers (``X-Secrets``)
    and cookies, raises ``InfrastructureError``.
    """
    headers = {"Accept-Encoding": "identity", **settings.pop("headers", {})}
    traced = aiohttp.TraceConfig()
    traced.on_request_redirect.append(_refuse_other_origin)
    return aiohttp.ClientSession(headers=headers, auto_decompress=False, trace_configs=[traced], **settings)


async def _refuse_other_origin(_: aiohttp.ClientSession, __: Any, redirect: aiohttp.TraceRequestRedirectParams) -> None:
    target = redirect.response.headers.get("Location", "")
    try:
        same = redirect.url.join(URL(target)).origin() == redirect.url.origin()
    except ValueError:  # no address
        same = False
    if not same:
        redirect.response.close()
        raise InfrastructureError(
            f"{redirect.url.origin()} redirects to {shown(target)}, which is another server and gets nothing that is "
            "meant for this one: give the address that serves the requests itself"
        )


def ask_in_fork(source: EnvironmentServer, ask: Callable[[aiohttp.ClientSession], Awaitable[Result]]) -> Result:
    """Return what ``ask`` returns; it runs in a fork, since the template must not keep connections."""

    async def asked() -> Result:
        async with asyncio.timeout(_ASK_WITHIN_S), open_session() as session:
            return await ask(session)

    try:
        return in_fork(lambda: asyncio.run(asked()))
    except ConfigurationError as error:
        raise ConfigurationError(f"the environment's server {source.url} cannot be used: {error}") from error


async def get_json(session: aiohttp.ClientSession, url: str) -> Any:
    """Return what a server sends at a URL; raise as ``checked_json`` does."""
    async with session.get(url) as response:
        return checked_json(url, response.status, await bounded_body(response))


def checked_json(url: str, status: int, body: bytes) -> Any:
    """Return the JSON of a response; an empty body is an empty object.

    Raises ``DataError`` for a request that the server refused and for what is no JSON, ``InfrastructureError`` for what
    may pass.
    """
    if status >= 400:
        said = body.decode(errors="replace")[:_MOST_CHARACTERS_OF_A_PROBLEM]
        kind = InfrastructureError if status >= 500 or status == 429 else DataError
        raise kind(f"{url} responded with status {status}: {said}")
    try:
        return json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise DataError(f"{url} sent no JSON: {error}") from error


async def begin_session(source: EnvironmentServer, attempt: Callable[[], Awaitable[Result]]) -> Result:
    """Repeat ``attempt`` with growing pauses while the server is unreachable or full, within the reset's time."""
    deadline = asyncio.get_running_loop().time() + _RESET_SHARE * source.timeout_s
    failures = 0
    while True:
        try:
            return await attempt()
        except (InfrastructureError, aiohttp.ClientError, OSError) as error:
            failures += 1
            pause_s = backoff_s(failures, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            if asyncio.get_running_loop().time() + pause_s > deadline:
                raise InfrastructureError(first_cause(error)) from error
            await asyncio.sleep(pause_s)


class ResourcesServer(Environment):
    """Hold a session with a resources server of NeMo Gym. ``source.arguments`` are added to each data row.

    ``/seed_session`` begins it, and its cookies name it. Each tool is a route; the model reads the body of its
    response, whatever the status. ``/verify`` returns the reward: it gets the conversation as a response of OpenAI's
    Responses API, as NeMo Gym's simple agent sends it.
    """

    gives_reward = True

    def __init__(self, source: EnvironmentServer, routes: Routes) -> None:
        self._source = source
        self._schemas = [schema for path in sorted(routes.paths - _NO_TOOLS) if (schema := _route_schema(routes, path))]
        self.tools = [self._route(Tool.of(schema, source.timeout_s)) for schema in self._schemas]
        self._session: aiohttp.ClientSession | None = None
        self._row: dict[str, Any] = {}

    def _route(self, description: Tool) -> LoadedTool:
        async def call(arguments: dict[str, Any], _: dict[str, Any]) -> ToolAnswer:
            content = (await self._post(f"/{description.name}", arguments))[1]
            return ToolAnswer(content.decode(errors="replace"))

        return LoadedTool(description, call)

    async def reset(self, prompt: Prompt) -> Messages | None:
        """Open a session for the data row: the columns of ``extra_info``, and ``responses_create_params``."""
        # Addresses without a name, such as 127.0.0.1, get cookies only in an unsafe jar.
        self._session = open_session(cookie_jar=aiohttp.CookieJar(unsafe=True))
        tools = [{"type": "function", "strict": False, **schema["function"]} for schema in self._schemas]
        written = {"input": prompt_messages(prompt), "tools": tools}
        self._row = {"responses_create_params": written, **prompt.extra_info, **self._source.arguments}
        await begin_session(self._source, lambda: self._post_checked("/seed_session", self._row))
        return None

    async def finish(self, completion: Messages) -> float | None:
        """Have the conversation verified."""
        verified = await self._post_checked("/verify", {**self._row, "response": _response(completion)})
        assert self._session is not None
        await self._session.close()
        refuse_masked(verified)
        reward: float | None = verified.get("reward")
        return reward

    async def _post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        assert self._session is not None
        try:
            async with self._session.post(f"{self._source.url.rstrip('/')}{path}", json=body) as response:
                return response.status, await bounded_body(response)
        except (aiohttp.ClientError, OSError) as error:
            raise InfrastructureError(f"{self._source.url}{path}: {type(error).__name__}: {error}") from error

    async def _post_checked(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        url = f"{self._source.url}{path}"
        return object_of(checked_json(url, *await self._post(path, body)), url)


def _route_schema(routes: Routes, path: str) -> dict[str, Any] | None:
    """Describe the tool at a path; None for a path that is no tool."""
    methods, name = routes.document["paths"][path], path.removeprefix("/")
    if members(methods).get("post") is None or "/" in name or "{" in name:
        return None
    operation = members(methods, "post")
    content = members(operation, "requestBody", "content", "application/json")
    parameters = routes.resolved(content.get("schema") or {"type": "object", "properties": {}})
    description = operation.get("description") or operation.get("summary") or name
    return function_schema(name, description, parameters)


def _response(completion: Messages) -> dict[str, Any]:
    """Return a conversation as a response of the Responses API."""
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


class OpenEnvServer(Environment):
    """Hold a session with an OpenEnv server, over its WebSocket ``/ws``. ``source.arguments`` are passed to ``reset``.

    The policy acts through one tool, ``step``, whose parameters are those of the server's action (``GET /schema``); on
    a server whose actions are MCP tools, through these tools. Rewards come with the steps and are added up.
    """

    def __init__(self, source: EnvironmentServer, routes: Routes) -> None:
        self._source = source
        schemas, self._has_mcp_tools = ask_in_fork(source, lambda session: _actions(session, source.url.rstrip("/")))
        self.tools = [self._action(Tool.of(schema, source.timeout_s)) for schema in schemas]
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._session: aiohttp.ClientSession | None = None
        self._one_at_a_time = asyncio.Lock()

    def _action(self, description: Tool) -> LoadedTool:
        async def call(arguments: dict[str, Any], _: dict[str, Any]) -> ToolAnswer:
            action = arguments
            if self._has_mcp_tools:
                action = {"type": "call_tool", "tool_name": description.name, "arguments": arguments}
            try:
                data = await self._ask("step", action)
                reward, observed = reward_of(data.get("reward"), "step"), data.get("observation")
                text = _tool_text(object_of(observed, "step")) if self._has_mcp_tools else _observation_text(data)
            except DataError as error:  # not the policy's: what the server would have said of the step is lost
                raise InfrastructureError(str(error)) from error
            return ToolAnswer(text, reward, bool(data.get("done")))

        return LoadedTool(description, call)

    async def reset(self, prompt: Prompt) -> Messages | None:
        """Open a session and reset it with the prompt's seed and the data row; append the first observation."""
        arguments = {"seed": prompt.seed, **prompt.extra_info, **self._source.arguments}
        self._session = open_session()
        text = _observation_text(await begin_session(self._source, lambda: self._open(arguments)))
        return with_observation(prompt_messages(prompt), f"\n\n{text}") if text else None

    async def finish(self, completion: Messages) -> float | None:
        """Close the session; the rewards came with the steps."""
        if self._socket is not None:
            await self._socket.close()
        if self._session is not None:
            await self._session.close()
        return None

    async def _ask(self, method: str, data: dict[str, Any]) -> dict[str, Any]:
        """Send one message and return the data of its answer."""
        assert self._socket is not None
        async with self._one_at_a_time:
            return await _exchange(self._socket, method, data)

    async def _open(self, arguments: dict[str, Any]) -> dict[str, Any]:
        assert self._session is not None
        self._socket = await self._session.ws_connect(_socket_url(self._source.url))
        return await self._ask("reset", arguments)


def reward_of(reward: Any, where: str) -> float | None:
    """Return the reward that a server sent with a step, None for none.

    Raises ``InfrastructureError`` if it is no finite number: the sample ends, because without it its sum is wrong.
    """
    try:
        return None if reward is None else finite(reward)
    except (TypeError, ValueError, OverflowError) as error:
        raise InfrastructureError(f"{where} sent the reward {shown(reward)}, which is not a finite number") from error


def object_of(content: Any, where: str) -> dict[str, Any]:
    """Return the JSON object that a server sent; raise ``DataError`` if it is none."""
    if not isinstance(content, dict):
        raise DataError(f"{where} sent {shown(content)}; it must send a JSON object")
    return content


async def _exchange(socket: aiohttp.ClientWebSocketResponse, method: str, data: dict[str, Any]) -> dict[str, Any]:
    try:
        await socket.send_json({"type": method, "data": data})
        message = await socket.receive()
    except (aiohttp.ClientError, OSError) as error:
        raise InfrastructureError(f"the connection to the environment ended: {error}") from error
    if message.type is not aiohttp.WSMsgType.TEXT:
        raise InfrastructureError("the environment closed the connection")
    where = "the environment's socket"
    answer = object_of(checked_json(where, 200, message.data.encode()), where)
    problem = answer.get("data")
    if not isinstance(problem, dict):
        raise DataError(f"the environment's socket sent {shown(answer)}; it must send {{type: …, data: {{…}}}}")
    if answer.get("type") != "error":
        return problem
    text = f"{problem.get('message')} {json.dumps(problem['errors'], default=str) if 'errors' in problem else ''}"
    if problem.get("code") in ("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR"):
        raise InfrastructureError(text.strip())
    raise ValueError(text.strip())


async def _actions(session: aiohttp.ClientSession, url: str) -> tuple[list[dict[str, Any]], bool]:
    """Return the tools that the policy may call, and True if they are MCP tools."""
    where = f"{url}/schema"
    schema = object_of(object_of(await get_json(session, where), where).get("action"), f"{where}, as its action,")
    properties = {name: each for name, each in members(schema, "properties").items() if name != "metadata"}
    # MCP actions reach a server only where its action is one of them, or the base class, which has no field of its own.
    if {"tool_name", "arguments"} <= properties.keys() or properties.keys() <= {"type"}:
        schemas = await _mcp_tools(session, url)
        if schemas:
            return schemas, True
        if "type" in properties:
            raise ConfigurationError("the server takes MCP tool calls as actions but lists no tools")
    required = schema.get("required")
    parameters = {
        **{key: each for key, each in schema.items() if key == "$defs"},
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if isinstance(required, list) and name in required],
    }
    return [function_schema("step", schema.get("description") or "Act in the environment.", parameters)], False


async def _mcp_tools(session: aiohttp.ClientSession, url: str) -> list[dict[str, Any]]:
    """Return the schemas of the MCP tools that a server lists; [] where it has none."""
    async with session.ws_connect(_socket_url(url)) as socket:
        request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        response = await _exchange(socket, "mcp", request)
    return tool_schemas(members(response, "result").get("tools"), "the environment's socket, as tools,")


def tool_schemas(listed: Any, where: str) -> list[dict[str, Any]]:
    """Return the descriptions of the tools that a server lists, null for none; raise ``DataError`` for no such list."""
    if not isinstance(listed, list | None):
        raise DataError(f"{where} sent {shown(listed)}; it must send a list of tools")
    tools = [object_of(tool, where) for tool in listed or []]
    return [function_schema(tool.get("name", ""), tool.get("description") or "", _parameters(tool)) for tool in tools]


def _tool_text(observation: dict[str, Any]) -> str:
    """Return the result of an MCP tool as the model reads it: its data, or else the text of its content."""
    if error := observation.get("error"):
        raise ValueError(str(members(error).get("message", error)))
    result = observation.get("result")
    if not isinstance(result, dict) or "content" not in result:
        return to_text(result)
    content = result["content"]
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise DataError(f"the environment sent the content {shown(content)}; it must send a list of objects")
    text = "\n".join(str(part.get("text")) for part in content if part.get("type") == "text")
    if result.get("is_error"):
        raise ValueError(text)
    data = result.get("data")
    return to_text(data) if data is not None else text


def _parameters(tool: dict[str, Any]) -> Any:
    return tool.get("inputSchema") or tool.get("input_schema") or {"type": "object", "properties": {}}


def _socket_url(url: str) -> str:
    return f"ws{url.rstrip('/').removeprefix('http')}/ws"


def _observation_text(data: dict[str, Any]) -> str:
    """Return an observation as the model reads it: its only field as it is, several as JSON."""
    observation = {
        name: value
        for name, value in object_of(data.get("observation") or {}, "the environment, as its observation,").items()
        if name not in ("done", "reward", "metadata") and value is not None
    }
    if len(observation) == 1:
        return to_text(next(iter(observation.values())))
    return to_text(observation) if observation else ""
