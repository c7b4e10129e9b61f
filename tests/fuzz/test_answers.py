"""The doors behind a URL: what http scorers, environments' servers and MCP servers answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import episodes
from outside_values import BODIES, VALUES, with_member
from plaudit_reward.endpoint.access import EndpointUsage
from plaudit_reward.endpoint.remote import RemoteClient
from plaudit_reward.endpoint.shapes import SHAPES
from plaudit_wire.errors import ScoringError
from plaudit_wire.records import Sample
from plaudit_workers.agents.messages import EnvironmentServer, McpServer
from plaudit_workers.agents.processes import AgentProcesses
from plaudit_workers.rollout.agents.tool_calls import ParsedCall
from plaudit_workers.rollout.agents.tools import ToolProcess

quietly = settings(suppress_health_check=list(HealthCheck), deadline=None)
WITHIN_S = 30.0
OUTCOMES = {"scored", "data_error", "infra_error", "timeout", "skipped"}
OUTPUT = {"blocks": [{"type": "text", "text": "a"}], "reward": 0.5, "finished": False}
CALLED = {"ok": True, "output": OUTPUT}
STEP = {"type": "observation", "data": {"observation": {"text": "a"}, "reward": 0.5, "done": False}}
RESULT = {"content": [{"type": "text", "text": "a"}], "isError": False}


class TooLong(bytes):
    """A body beyond every limit, which hypothesis names in a word."""

    def __repr__(self) -> str:
        return "5 MiB of x"


ANSWERS = st.one_of(
    BODIES,
    *(
        values.map(lambda value: json.dumps(value).encode())
        for values in (
            with_member({"reward": 1.0}),
            with_member(CALLED),
            with_member(OUTPUT).map(lambda output: {**CALLED, "output": output}),
            with_member(STEP),
            with_member(STEP["data"]).map(lambda data: {**STEP, "data": data}),
            with_member({"jsonrpc": "2.0", "id": 2, "result": RESULT}),
            with_member(RESULT).map(lambda result: {"jsonrpc": "2.0", "id": 2, "result": result}),
            st.lists(st.just({"role": "user", "blocks": [{"type": "text", "text": "a"}]}).flatmap(with_member)),
            VALUES.map(lambda value: [{"role": "user", "blocks": [value]}]),
        )
    ),
    st.just(TooLong(b"x" * (5 << 20))),
)
STATUSES = st.sampled_from([200, 200, 200, 204, 302, 400, 404, 500])
SERVERS = {"nemo": "take", "open-reward": "take", "openenv": "step"}


def call(tool: str) -> str:
    return f'<tool_call>\n{{"name": "{tool}", "arguments": {{"number": 1}}}}\n</tool_call>'


class Server:
    """Answers as each kind of server does, or with ``answer`` from the session on."""

    def __init__(self) -> None:
        self.status, self.body, self.kind, self.honest = 200, b"{}", "application/json", True

    def application(self, kind: str) -> web.Application:
        """Return the server of one kind."""
        application = web.Application()
        for path, content in KINDS[kind].items():
            application.router.add_route("*", path, self._given(content))
        if kind == "openenv":
            application.router.add_get("/ws", self._socket)
        if kind == "mcp":
            application.router.add_post("/mcp", self._rpc)
        application.router.add_route("*", "/{path:.*}", self._answer)
        return application

    def _given(self, content: Any) -> Any:
        async def given(request: web.Request) -> web.Response:
            return web.json_response(content)

        return given

    async def _answer(self, request: web.Request) -> web.Response:
        if self.honest:
            return web.json_response(HONEST.get(request.path.rpartition("/")[2], {}))
        return web.Response(status=self.status, body=self.body, content_type=self.kind)

    async def _rpc(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if "id" not in asked:
            return web.Response(status=202)
        if asked["method"] == "tools/call" and not self.honest:
            return await self._answer(request)
        results = {"tools/list": {"tools": [{"name": "take", "inputSchema": {"type": "object"}}]}, "tools/call": RESULT}
        result = results.get(asked["method"]) or {
            "protocolVersion": asked.get("params", {}).get("protocolVersion", "2025-06-18"),
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "s", "version": "1"},
        }
        return web.json_response({"jsonrpc": "2.0", "id": asked["id"], "result": result})

    async def _socket(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            if self.honest:
                await socket.send_json(STEP)
            elif self.status == 200 and message.data:
                await socket.send_str(self.body.decode(errors="replace"))
            else:
                break
        return socket


TAKE = {"name": "take", "input_schema": {"type": "object", "properties": {"number": {}}}}
KINDS: dict[str, dict[str, Any]] = {
    "scorer": {},
    "mcp": {},
    "nemo": {"/openapi.json": {"paths": {"/seed_session": {}, "/verify": {}, "/take": {"post": {"summary": "Take"}}}}},
    "open-reward": {
        "/openapi.json": {"paths": {"/list_environments": {}}},
        "/list_environments": ["s"],
        "/s/tools": {"tools": [TAKE]},
        "/s/splits": ["train"],
    },
    "openenv": {
        "/openapi.json": {"paths": {"/schema": {}}},
        "/schema": {"action": {"properties": {"number": {"type": "integer"}}}},
    },
}
HONEST: dict[str, Any] = {
    "verify": {"reward": 1.0},
    "prompt": [{"type": "text", "text": "a"}],
    "task_tools": {"tools": [TAKE]},
}


class Doors:
    """The servers, and the agents that play on them."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self.runner, self.server = runner, Server()
        self.urls: dict[str, str] = {}
        self.agents: dict[str, Any] = {}
        self.tools: dict[str, Any] = {}
        self._processes: list[AgentProcesses] = []
        self._runners: list[web.AppRunner] = []

    async def open(self, tokenizer: Any) -> None:
        """Start all."""
        for kind in KINDS:
            running = web.AppRunner(self.server.application(kind))
            await running.setup()
            site = web.TCPSite(running, "127.0.0.1", 0)
            await site.start()
            self._runners.append(running)
            self.urls[kind] = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
        self._processes.append(AgentProcesses([McpServer(f"{self.urls['mcp']}/mcp", timeout_s=3.0)]))
        self.tools = {tool.name: tool for tool in await self._processes[0].open()}
        for kind in SERVERS:
            self._processes.append(AgentProcesses([EnvironmentServer(self.urls[kind], timeout_s=2.0)]))
            self.agents[kind] = await episodes.open_agent(self._processes[-1], tokenizer, limit_s=3.0)

    async def called(self) -> str:
        """Call the tool of the MCP server in a process of its own; return how the call ended."""
        async with ToolProcess(self._processes[0], self.tools, {}) as process:
            (end,) = await process.call([ParsedCall("take", {})])
            msgspec.msgpack.encode(end.text)
            return end.outcome

    async def close(self) -> None:
        """End all."""
        for processes in self._processes:
            await processes.close()
        for running in self._runners:
            await running.cleanup()


async def becomes(well: Callable[[], Awaitable[bool]]) -> None:
    """Wait until an honest server is believed again: the short limits here end calls on a slow machine too."""
    async with asyncio.timeout(2 * WITHIN_S):
        while not await well():
            pass


@pytest.fixture(scope="module")
def doors(tokenizer: Any) -> Iterator[Doors]:
    with asyncio.Runner() as runner:
        doors = Doors(runner)
        runner.run(doors.open(tokenizer))
        yield doors
        runner.run(doors.close())


@pytest.mark.long
@quietly
@given(st.sampled_from(sorted(SHAPES)), STATUSES, ANSWERS)
def test_what_a_scorer_answers_is_a_score_or_its_samples_failure(
    doors: Doors, shape: str, status: int, body: bytes
) -> None:
    async def scored() -> None:
        client = RemoteClient(f"{doors.urls['scorer']}/verify", SHAPES[shape], EndpointUsage())
        try:
            with suppress(ScoringError):
                msgspec.msgpack.encode(await client.score(Sample("g", 0, "a", "p", "r"), WITHIN_S))
        finally:
            await client.close()

    doors.server.honest, doors.server.status, doors.server.body = False, status, body
    doors.runner.run(asyncio.wait_for(scored(), 2 * WITHIN_S))


@pytest.mark.long
@quietly
@given(st.sampled_from(sorted(SERVERS)), STATUSES, ANSWERS, st.sampled_from(["application/json", "text/event-stream"]))
def test_what_an_environments_server_answers_costs_its_own_sample(
    doors: Doors, tokenizer: Any, kind: str, status: int, body: bytes, content: str
) -> None:
    server, turns = doors.server, (call(SERVERS[kind]), "Done.")
    row = {"split": "train", "index": 0}

    async def played() -> Any:
        agent = doors.agents[kind]
        return (await episodes.play(agent, tokenizer, *turns, extra_info=row))[1]

    server.honest, server.status, server.kind = False, status, content
    server.body = body if content != "text/event-stream" else b"event: end\ndata: " + body + b"\n\n"
    published = doors.runner.run(asyncio.wait_for(played(), WITHIN_S))
    msgspec.msgpack.encode(published)
    for each in (published.sample.failure, published.sample.agent_reward):
        assert each is None or each.outcome in OUTCOMES

    async def well() -> bool:
        return (await played()).sample.failure is None

    server.honest = True
    if kind != "open-reward":  # its honest calls are streams of events
        doors.runner.run(becomes(well))


@quietly
@given(STATUSES, ANSWERS, st.sampled_from(["application/json", "text/event-stream", "text/html"]))
@pytest.mark.long
def test_what_an_mcp_server_answers_ends_its_own_call(doors: Doors, status: int, body: bytes, content: str) -> None:
    server = doors.server
    server.honest, server.status, server.kind = False, status, content
    server.body = body if content != "text/event-stream" else b"event: message\ndata: " + body + b"\n\n"
    assert doors.runner.run(asyncio.wait_for(doors.called(), WITHIN_S)) in {"ok", "error", "timeout", "killed"}

    async def well() -> bool:
        return await doors.called() == "ok"

    server.honest = True
    doors.runner.run(becomes(well))
