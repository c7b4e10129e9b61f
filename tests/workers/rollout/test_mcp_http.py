"""Tools of a real MCP server over streamable HTTP: headers, kinds of results, a slow server, a restart."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plaudit_job.load import load_job
from plaudit_wire.errors import RefusedError
from plaudit_workers.agents.messages import McpServer
from plaudit_workers.agents.processes import AgentProcesses, sources_of
from plaudit_workers.launch.redis import free_port
from plaudit_workers.rollout.agents.machine_tools import CallEnd
from plaudit_workers.rollout.agents.tool_calls import ParsedCall
from plaudit_workers.rollout.agents.tools import ToolProcess

TOKEN = "hidden-1"
SERVER = """
import asyncio, os, sys
import uvicorn
from mcp.server import MCPServer
from mcp.server.mcpserver import Image
from mcp.types import EmbeddedResource, TextResourceContents

server = MCPServer("things")
calls = 0


@server.tool()
def count() -> int:
    "Count the calls."
    global calls
    calls += 1
    return calls


@server.tool()
def show() -> list:
    "Show a picture and a file."
    file = TextResourceContents(uri="file:///a.txt", text="content of a", mime_type="text/plain")
    return ["look", Image(data=b"12345678", format="png"), EmbeddedResource(type="resource", resource=file)]


@server.tool()
def table() -> dict[str, int]:
    "Return structured content."
    return {"rows": 3}


@server.tool()
async def slow() -> str:
    "Take a minute."
    await asyncio.sleep(60)
    return "late"


@server.tool()
def refuse(number: int) -> str:
    "Raise."
    from mcp.server.mcpserver.exceptions import ToolError
    raise ToolError("not today")


class Guard:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        given = dict(scope.get("headers", ())).get(b"authorization")
        if scope["type"] == "http" and given != b"Bearer hidden-1":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"who are you?"})
            return
        await self.app(scope, receive, send)


uvicorn.run(Guard(server.streamable_http_app()), port=int(sys.argv[1]), log_level="error")
"""


class Server:
    """The server's process."""

    def __init__(self, file: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/mcp"
        self._command = [sys.executable, str(file), str(self.port)]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL)
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert self.process.poll() is None
                time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("mcp") / "server.py"
    file.write_text(SERVER)
    server = Server(file)
    yield server
    server.kill()


@pytest.fixture
def with_tools(server: Server) -> Callable:
    """Runs a coroutine function with the server's tools: it gets what calls them in one sample."""

    async def run(use: Callable, timeout_s: float) -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        processes = AgentProcesses([McpServer(server.url, timeout_s=timeout_s, headers=headers)])
        try:
            tools = {tool.name: tool for tool in await processes.open()}
            async with ToolProcess(processes, tools, {}) as process:

                async def call(name: str, **arguments: object) -> CallEnd:
                    (end,) = await process.call([ParsedCall(name, arguments)])
                    return end

                await use(call)
        finally:
            await processes.close()

    return lambda use, timeout_s=30.0: asyncio.run(run(use, timeout_s))


@pytest.mark.long
def test_results_of_all_kinds_and_errors_become_text(with_tools: Callable) -> None:
    async def use(call: Callable) -> None:
        shown = await call("show")
        assert (shown.outcome, shown.text) == ("ok", "look\n[image/png, 9 bytes]\ncontent of a")
        assert "rows" in (await call("table")).text
        refused = await call("refuse", number=1)
        assert (refused.outcome, "not today" in refused.text) == ("error", True)
        invalid = await call("refuse", number="x")
        assert (invalid.outcome, "valid integer" in invalid.text) == ("error", True)

    with_tools(use)


@pytest.mark.long
def test_a_slow_server_is_a_timeout_and_the_sample_goes_on(with_tools: Callable) -> None:
    async def use(call: Callable) -> None:
        slow = await call("slow")
        assert (slow.outcome, slow.text) == ("timeout", "slow gave no result within 3 s")
        assert (await call("table")).outcome == "ok"

    with_tools(use, 3.0)


@pytest.mark.long
def test_a_restarted_server_fails_the_calls_that_need_it_and_no_later_one(with_tools: Callable, server: Server) -> None:
    async def use(call: Callable) -> None:
        assert (await call("count")).outcome == "ok"
        during = asyncio.create_task(call("slow"))
        await asyncio.sleep(0.3)
        server.kill()
        ended = await during
        assert (ended.outcome, f"MCP server {server.url}" in ended.text) == ("killed", True)
        assert (await call("count")).outcome == "killed"
        await asyncio.to_thread(server.start)
        again = await call("count")
        assert (again.outcome, again.text) == ("ok", "1")

    with_tools(use)


@pytest.mark.long
def test_a_server_that_does_not_answer_any_more_costs_only_the_call(with_tools: Callable, server: Server) -> None:
    async def use(call: Callable) -> None:
        assert (await call("count")).outcome == "ok"
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            assert (await call("count")).outcome == "timeout"
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        assert (await call("count")).outcome == "ok"

    with_tools(use, 3.0)


def test_a_server_that_wants_a_token_is_refused_without_one(server: Server) -> None:
    async def open_without() -> None:
        processes = AgentProcesses([McpServer(server.url)])
        try:
            await processes.open()
        finally:
            await processes.close()

    with pytest.raises(RefusedError, match=f"MCP server {server.url} cannot be used: .*Check mcp.url, and whether"):
        asyncio.run(open_without())


JOB = """
apiVersion: plaudit.dev/v1alpha1
kind: RLJob
metadata: {name: mcp}
spec:
  model: {source: none}
  data: {train: {path: none.parquet}}
  algorithm: {steps: 1}
  rollout:
    sampling: {maxTokens: 8}
    agent:
      kind: tools
      tools: [{mcp: {url: "http://search:8000/mcp", headers: {Authorization: "Bearer ${SEARCH_TOKEN}", X-Team: a}}}]
  reward: {scorers: [{name: a, kind: rule, rule: math}]}
  trainer: {}
"""


def test_headers_take_secrets_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    job = load_job(tmp_path / "job.yaml")
    with pytest.raises(RefusedError, match=r"headers\.Authorization needs the environment variable SEARCH_TOKEN"):
        sources_of(job)
    monkeypatch.setenv("SEARCH_TOKEN", TOKEN)
    (source,) = sources_of(job)
    assert source.headers == {"Authorization": f"Bearer {TOKEN}", "X-Team": "a"}
