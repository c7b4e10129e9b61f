"""Use servers of the Open Reward Standard (the package ``openreward``): their sessions, and their tasks as data rows.

A session is one episode of one task: ``/create`` begins it, ``/messages`` (or ``/prompt``) is its prompt, ``/call``
runs a tool and answers with text, a reward and whether the episode is finished; ``/delete`` ends it. The answer of a
call is a stream of events, which is resumed where a connection breaks.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp

from plaudit_reward.endpoint.shapes import OPEN_REWARD_ROUTE, open_reward_chat, open_reward_text
from plaudit_reward.http import MAX_RESPONSE_BYTES, ConnectionLostError, bounded_body, bounded_parts
from plaudit_wire.errors import ConfigurationError, DataError, InfrastructureError, ScoringError
from plaudit_wire.messages import Prompt
from plaudit_wire.printable import shown
from plaudit_workers.agents.environment import Environment, Messages
from plaudit_workers.agents.environment_servers import (
    ask_in_fork,
    begin_session,
    checked_json,
    object_of,
    open_session,
    reward_of,
    tool_schemas,
)
from plaudit_workers.agents.functions import LoadedTool, ToolAnswer
from plaudit_workers.agents.messages import EnvironmentServer, Tool, prompt_messages

_KEEP_ALIVE_S = 30.0
"""Servers end a session that nobody uses for minutes, such as while the policy writes a long turn."""
_RESUMES = 3
_TASKS_AT_A_TIME = 1000
_MOST_BYTES_OF_TASKS = 64 << 20
_TASKS_WITHIN_S = 300.0
_MOST_CHARACTERS_OF_A_NAME = 1024
"""Of a session: servers refuse headers of several KiB."""


class _Client:
    """Ask a server.

    Args:
        session: connections; its headers name the server's session, where there is one.
        url: of the server.
        environment: the name of the environment in it; empty: not known yet.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, environment: str = "") -> None:
        self._session = session
        self._url = url.rstrip("/")
        self.environment = environment

    async def choose(self, arguments: dict[str, Any]) -> str:
        """Return the environment of ``env_name``, the server's first without it; ask for it from now on."""
        names = await self.ask("GET", OPEN_REWARD_ROUTE)
        known = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
        wanted = arguments.get("env_name") or (known[0] if known else "")
        if not isinstance(wanted, str) or wanted.lower() not in map(str.lower, known):
            raise ConfigurationError(
                f"arguments.env_name is {shown(wanted)}; the server has {', '.join(known) or 'none'}"
            )
        self.environment = wanted
        return wanted

    async def of(self, method: str, path: str, body: Any = None, most_bytes: int = MAX_RESPONSE_BYTES) -> Any:
        """Ask for something of the environment; see ``ask``."""
        return await self.ask(method, f"/{quote(self.environment, safe='')}{path}", body, most_bytes)

    async def ask(self, method: str, path: str, body: Any = None, most_bytes: int = MAX_RESPONSE_BYTES) -> Any:
        """Return the JSON of a response; raise as ``checked_json`` does."""
        url = f"{self._url}{path}"
        async with self._session.request(method, url, json=body) as response:
            return checked_json(url, response.status, await bounded_body(response, most_bytes))

    async def session_id(self) -> str:
        """Return the name of a new session: the server's, or our own where it gives none."""
        url, given = f"{self._url}/create_session", None
        async with self._session.post(url) as response:
            if response.content_type.endswith("event-stream"):
                given = "".join([data.strip() async for event, data in _events(response) if event == "task_id"])
            else:
                found = checked_json(url, response.status, await bounded_body(response))
                given = found.get("sid") if isinstance(found, dict) else None
        if not isinstance(given, str) or not given:
            return str(uuid.uuid4())
        if len(given) > _MOST_CHARACTERS_OF_A_NAME or not (given.isascii() and given.isprintable()):
            raise DataError(
                f"{url} names the session {shown(given)}, which no HTTP header can carry: it must be of at most "
                f"{_MOST_CHARACTERS_OF_A_NAME} visible ASCII characters"
            )
        return given

    async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        """Run a tool and return what it answers; resume where the connection breaks once the server has begun."""
        url, body = f"{self._url}/{quote(self.environment, safe='')}/call", {"name": tool, "input": arguments}
        resumes = 0
        while True:
            try:
                return checked_json(url, 200, (await self._result(url, body)).encode())
            except (aiohttp.ClientError, OSError, ConnectionLostError) as error:
                resumes += 1
                if "task_id" not in body or resumes > _RESUMES:
                    raise InfrastructureError(f"{url}: {type(error).__name__}: {error}") from error

    async def _result(self, url: str, body: dict[str, Any]) -> str:
        """Return what the events of a call carry; note the name by which it is resumed in ``body``."""
        parts = []
        async with self._session.post(url, json=body) as response:
            if response.status != 200:
                checked_json(url, max(response.status, 400), await bounded_body(response))
            async for event, data in _events(response):
                if event == "task_id":
                    body["task_id"] = data.strip()
                elif event == "error":
                    raise RuntimeError(data)
                elif event in ("chunk", "end"):
                    parts.append(data)
                if event == "end":
                    return "".join(parts)
        raise ConnectionLostError("the events ended before the result")


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, str]]:
    """Yield the server-sent events of a response: kind and data."""
    event, data, rest = "", list[str](), b""
    async for part in bounded_parts(response):
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            name, _, value = line.rstrip(b"\r").decode(errors="replace").partition(":")
            if not name and not value:
                if event:
                    yield event, "\n".join(data)
                event, data = "", []
            elif name == "event":
                event = value.strip()
            elif name == "data":
                data.append(value.removeprefix(" "))


class OpenRewardServer(Environment):
    """Hold a session with a server of the Open Reward Standard, for the task that the data row names.

    The policy acts through its tools; rewards come with their results and are added up. A terminal tool, which such a
    server may have, gets the text of the turn that calls no tool. ``source.arguments``: ``env_name``, ``toolset_name``
    and ``secrets`` of the session.
    """

    def __init__(self, source: EnvironmentServer) -> None:
        self._source = source
        found = ask_in_fork(source, lambda session: _described(session, source))
        self._environment: str = found["environment"]
        self._terminal: dict[str, Any] | None = found["terminal"]
        self.gives_reward = self._terminal is not None
        self.tools = [self._tool(Tool.of(schema, source.timeout_s)) for schema in found["tools"]]
        self._session: aiohttp.ClientSession | None = None
        self._client: _Client | None = None
        self._pings: asyncio.Task[None] | None = None
        self._rewards: list[float] = []
        self._done = False

    def _tool(self, description: Tool) -> LoadedTool:
        async def call(arguments: dict[str, Any], _: dict[str, Any]) -> ToolAnswer:
            return await self._call(description.name, arguments)

        return LoadedTool(description, call)

    async def _call(self, tool: str, arguments: dict[str, Any]) -> ToolAnswer:
        assert self._client is not None
        where = f"tool {tool} of {self._source.url}"
        answer = object_of(await self._client.call(tool, arguments), where)
        if answer.get("ok") is not True:
            raise ValueError(answer.get("error"))
        output = object_of(answer.get("output"), where)
        reward = reward_of(output.get("reward"), where)
        self._rewards += [] if reward is None else [reward]
        self._done = self._done or output.get("finished") is True
        return ToolAnswer(open_reward_text(output.get("blocks"), images=True), reward, output.get("finished") is True)

    async def reset(self, prompt: Prompt) -> Messages | None:
        """Begin the session of the row's task; return the row's messages, without an empty last one, and the task's."""
        begin = {"env_name": self._environment, **_task(prompt), **_given(self._source.arguments, "toolset_name")}

        async def create() -> None:
            if self._session is not None:
                await self._session.close()
            self._session, self._client = await _opened(self._source, self._environment)
            await self._client.ask("POST", "/create", begin)

        await begin_session(self._source, create)
        assert self._client is not None
        self._pings = asyncio.create_task(_keep_alive(self._client))
        task = await begin_session(self._source, self._prompt)
        given = prompt_messages(prompt)
        return [*(given if given[-1].get("content") else given[:-1]), *task]

    async def _prompt(self) -> Messages:
        """Return the task's prompt; it waits until the server has set the session up."""
        assert self._client is not None
        try:
            messages = await self._client.of("GET", "/messages")
        except DataError:  # a server before version 0.1.157 has no conversations
            messages = [{"role": "user", "blocks": await self._client.of("GET", "/prompt")}]
        if not isinstance(messages, list) or not messages:
            raise DataError(f"{self._source.url} sent the prompt {shown(messages)}; it must be a list of messages")
        return [made for message in messages for made in open_reward_chat(message)]

    async def finish(self, completion: Messages) -> float | None:
        """Let the terminal tool judge a last turn without a call; end the session; return the sum of all rewards."""
        assert self._client is not None
        assert self._session is not None
        assert self._pings is not None
        last = completion[-1] if completion else {}
        if self._terminal is not None and not self._done and last.get("role") == "assistant":
            argument = self._terminal.get("arg")
            await self._call(self._terminal["name"], {argument: last.get("content") or ""} if argument else {})
        self._pings.cancel()
        with contextlib.suppress(ScoringError, aiohttp.ClientError, OSError):  # the server ends it by itself
            await self._client.ask("POST", "/delete")
        await self._session.close()
        return sum(self._rewards) if self._rewards else None


async def _opened(source: EnvironmentServer, environment: str) -> tuple[aiohttp.ClientSession, _Client]:
    """Return connections of a new session, and who asks over them."""
    headers: dict[str, str] = {}
    if secrets := source.arguments.get("secrets"):
        encoded = json.dumps(
            {name: {"value": value} for name, value in object_of(secrets, "arguments.secrets").items()}
        )
        headers["X-Secrets"] = base64.b64encode(encoded.encode()).decode()
    async with open_session() as unnamed:
        name = await _Client(unnamed, source.url).session_id()
    session = open_session(headers={**headers, "X-Session-ID": name}, timeout=aiohttp.ClientTimeout(total=None))
    return session, _Client(session, source.url, environment)


async def _keep_alive(client: _Client) -> None:
    while True:
        await asyncio.sleep(_KEEP_ALIVE_S)
        with contextlib.suppress(ScoringError, aiohttp.ClientError, OSError):
            await client.ask("POST", "/ping")


def _given(arguments: dict[str, Any], name: str) -> dict[str, Any]:
    return {name: arguments[name]} if arguments.get(name) else {}


def _task(prompt: Prompt) -> dict[str, Any]:
    """Return the task that a data row names, as ``/create`` reads it."""
    row = prompt.extra_info
    if isinstance(row.get("task_spec"), dict):
        return {"task_spec": row["task_spec"]}
    split, index = row.get("split"), row.get("task_index", row.get("index"))
    if not isinstance(split, str) or not isinstance(index, int):
        raise DataError(
            "the row names no task of the environment's server: give extra_info.task_spec, or split and task_index; or "
            "take the server's own tasks with data.train.split"
        )
    return {"split": split, "index": index}


async def _described(session: aiohttp.ClientSession, source: EnvironmentServer) -> dict[str, Any]:
    """Return the environment's name, the tools that the policy may call, and the terminal tool."""
    client = _Client(session, source.url)
    environment = await client.choose(source.arguments)
    listed = object_of(await client.of("GET", "/tools"), source.url)
    toolset = _given(source.arguments, "toolset_name")
    try:
        listed = await _task_tools(source, client, toolset)
    except (ScoringError, aiohttp.ClientError, OSError):
        if toolset:  # its tools are those of a session only
            raise
    schemas = tool_schemas(listed.get("tools"), f"{source.url}, as tools,")
    return {
        "environment": environment,
        "tools": schemas,
        "terminal": _terminal(listed.get("terminal_tool"), source.url),
    }


def _terminal(described: Any, url: str) -> dict[str, Any] | None:
    """Return the terminal tool, whose name is a text and whose ``arg``, if it has one, too; None without one."""
    if described is None:
        return None
    tool = object_of(described, f"{url}, as its terminal tool,")
    if not isinstance(tool.get("name"), str) or not isinstance(tool.get("arg"), str | None):
        raise DataError(f"{url} has the terminal tool {shown(tool)}; name and arg must be texts")
    return tool


async def _task_tools(source: EnvironmentServer, client: _Client, toolset: dict[str, Any]) -> dict[str, Any]:
    """Return the tools of a session of the first task: those of single tasks are listed nowhere else."""
    split = _splits(await client.of("GET", "/splits"))[0]
    session, of_session = await _opened(source, client.environment)
    async with session:
        first = {"env_name": client.environment, "split": split, "index": 0, **toolset}
        await of_session.ask("POST", "/create", first)
        try:
            return object_of(await of_session.of("GET", "/task_tools"), source.url)
        finally:
            await of_session.ask("POST", "/delete")


def _splits(listed: Any) -> list[str]:
    names = (
        [each.get("name") if isinstance(each, dict) else each for each in listed] if isinstance(listed, list) else []
    )
    found = [name for name in names if isinstance(name, str)]
    if not found:
        raise DataError(f"the environment's server lists the splits {shown(listed)}; it must have one at least")
    return found


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise DataError(f"the environment's server sent {shown(value)}; it must send a list of tasks")
    return value


def write_tasks(source: EnvironmentServer, split: str, file: Path) -> None:
    """Write the tasks of a split as data rows (JSON lines in verl's columns).

    The prompt is empty: each session gives its own. Raises ``ConfigurationError`` if the server does not give them.
    """

    async def asked() -> None:
        async with asyncio.timeout(_TASKS_WITHIN_S), open_session() as session:
            client = _Client(session, source.url)
            environment = await client.choose(source.arguments)
            known = _splits(await client.of("GET", "/splits"))
            if split not in known:
                raise ConfigurationError(f"the server has no split {split!r}; it has {', '.join(known)}")
            with file.open("w", encoding="utf-8") as lines:
                index = 0
                async for task in _tasks(client, split):
                    row = {
                        "data_source": environment,
                        "prompt": [{"role": "user", "content": ""}],
                        "reward_model": {"ground_truth": None},
                        "extra_info": {"split": split, "task_index": index, "task_spec": task},
                    }
                    lines.write(json.dumps(row) + "\n")
                    index += 1

    try:
        with ThreadPoolExecutor(1) as thread:  # the caller may have an event loop
            thread.submit(asyncio.run, asked()).result()
    except (ScoringError, aiohttp.ClientError, OSError) as error:
        raise ConfigurationError(f"{source.url} does not give its tasks: {error or type(error).__name__}") from error


async def _tasks(client: _Client, split: str) -> AsyncIterator[dict[str, Any]]:
    """Yield the tasks of a split, a thousand at a time."""
    parts: list[tuple[str, dict[str, Any]]] = [("/tasks", {"split": split})]
    try:
        found = object_of(await client.of("POST", "/num_tasks", {"split": split}), "/num_tasks").get("num_tasks")
        starts = range(0, found if isinstance(found, int) else 0, _TASKS_AT_A_TIME)
        parts = [("/task_range", {"split": split, "start": at, "stop": at + _TASKS_AT_A_TIME}) for at in starts]
    except DataError:  # an older server lists all at once
        pass
    for path, body in parts:
        listed = object_of(await client.of("POST", path, body, _MOST_BYTES_OF_TASKS), path)
        for task in _list(listed.get("tasks")):
            yield object_of(task, path)
