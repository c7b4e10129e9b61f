"""MCP servers and programs that misbehave: each costs its own call or sample, in its time and by name."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from aiohttp import web

from builders import make_prompt
from episodes import served
from plaudit_metrics.service import http_server
from plaudit_wire.errors import RefusedError
from plaudit_wire.messages import Sampling
from plaudit_workers.agents.messages import FinishedSample, McpServer
from plaudit_workers.agents.processes import AgentProcesses
from plaudit_workers.rollout.agents.endpoint import EndpointServer
from plaudit_workers.rollout.agents.machine_tools import CallEnd
from plaudit_workers.rollout.agents.session import ChatFormats, EndpointSession
from plaudit_workers.rollout.agents.tool_calls import ParsedCall
from plaudit_workers.rollout.agents.tools import ToolProcess
from waiting import until

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # vLLM and torch warn when they are imported
    pytest.mark.asyncio(loop_scope="module"),  # the tests share the template process, and so the event loop
]

SERVER = r"""
import json, os, signal, sys, time

CALL = {"content": [{"type": "text", "text": "fine"}], "isError": False}
TOOLS = {"tools": [{"name": "take", "inputSchema": {"type": "object"}}]}
listing = sys.argv[1] if len(sys.argv) > 1 else "honest"
pages = 0


def say(data):
    while data:
        data = data[os.write(1, data):]


def send(**message):
    say(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")


def raw(id, result):
    say(b'{"jsonrpc": "2.0", "id": %d, "result": %s}\n' % (id, result))


def tools(id):
    global pages
    pages += 1
    page = {"tools": [{**TOOLS["tools"][0], "name": f"take{pages}"}]}
    if listing == "pages":
        send(id=id, result=page | ({"nextCursor": "more"} if pages < 3 else {}))
    elif listing == "endless":
        send(id=id, result=page | {"nextCursor": "more", "tools": page["tools"] * 500})
    elif listing == "half":
        raw(id, b'{"tools": [{"name": "a\\ud800", "inputSchema": {"type": "object"}}]}')
    elif listing == "deep":
        raw(id, b"[" * 100_000 + b"]" * 100_000)
    elif listing == "wrong":
        send(id=id, result={"tools": [{"name": 5, "inputSchema": {"type": "object"}}]})
    elif listing == "ends":
        os._exit(3)
    elif listing == "raises":
        import of_nobody
    else:
        send(id=id, result=TOOLS)


def flood():
    while True:
        send(method="notifications/message", params={"level": "info", "data": "x"})


def fork(id):
    if os.fork() == 0:  # it holds the pipes
        os.setsid()
        time.sleep(3600)
    os._exit(0)


WAYS = {
    "fine": lambda id: send(id=id, result=CALL),
    "types": lambda id: send(id=id, result={"content": 5}),
    "null": lambda id: raw(id, b"null"),
    "deep": lambda id: raw(id, b'{"content": [], "structuredContent": {"a": %s}}' % (b"[" * 100_000 + b"]" * 100_000)),
    "half of a pair": lambda id: raw(id, b'{"content": [{"type": "text", "text": "a\\ud800b"}]}'),
    "beyond 64 bits": lambda id: raw(id, b'{"content": [], "structuredContent": {"n": 147573952589676412928}}'),
    "half a line": lambda id: (say(b'{"jsonrpc": "2.0", "id"'), os._exit(0)),
    "killed": lambda id: os.kill(os.getpid(), signal.SIGKILL),
    "prints": lambda id: (say(b'{"level": "info"}\nhello\n\xff\n5\n' * 100), send(id=id, result=CALL)),
    "bad notification": lambda id: (send(method="notifications/progress", params={"a": 5}), send(id=id, result=CALL)),
    "bad method": lambda id: (send(method=5), send(id=id, result=CALL)),
    "other id": lambda id: send(id=id + 1000, result=CALL),
    "never": lambda id: time.sleep(3600),
    "flood": lambda id: flood(),
    "fork": fork,
}
for line in sys.stdin.buffer:
    asked = json.loads(line)
    method, id = asked.get("method"), asked.get("id")
    if method == "initialize":
        about = {"serverInfo": {"name": "s", "version": "1"}, "capabilities": {"tools": {}}}
        send(id=id, result={"protocolVersion": asked["params"]["protocolVersion"], **about})
    elif method == "tools/list":
        tools(id)
    elif method == "tools/call":
        WAYS[asked["params"]["arguments"]["way"]](id)
    elif id is not None:
        send(id=id, error={"code": -32601, "message": "unknown"})
"""
ENDS = [
    ("fine", "ok", "fine"),
    ("types", "error", r"sent no result: content: Input should be a valid list, it is 5$"),
    ("null", "killed", r'sent an answer that is no message of MCP: \'{"jsonrpc"'),
    ("deep", "killed", "sent an answer that is no message of MCP"),
    ("half of a pair", "ok", "a\N{REPLACEMENT CHARACTER}b"),
    ("beyond 64 bits", "ok", "147573952589676412928"),
    ("half a line", "killed", "its process ended with exit code 0"),
    ("killed", "killed", "its process was killed by SIGKILL"),
    ("prints", "ok", "fine"),
    ("bad notification", "ok", "fine"),
    ("bad method", "ok", "fine"),
    ("other id", "timeout", "take gave no result within"),
    ("never", "timeout", "take gave no result within"),
    ("flood", "timeout", "take gave no result within"),
    ("fork", "timeout", "take gave no result within"),
]
LISTS = [
    ("endless", "its list of tools has no end"),
    ("deep", "it sent an answer that is no message of MCP"),
    ("wrong", r"it sent no list of tools: tools\.0\.name: Input should be a valid string, it is 5"),
    ("ends", "its process ended with exit code 3"),
    ("raises", "its process ended with exit code 1: ModuleNotFoundError: No module named 'of_nobody'"),
]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mcp") / "hostile_mcp_server.py"
    path.write_text(SERVER)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def processes(file: Path) -> AsyncIterator[AgentProcesses]:
    processes = AgentProcesses([McpServer(command=[sys.executable, str(file)], timeout_s=12.0)])
    yield processes
    await processes.close()


async def take(processes: AgentProcesses, *ways: str) -> list[CallEnd]:
    """Call the tool of one sample, one time after the other."""
    tools = {tool.name: tool for tool in await processes.open()}
    async with ToolProcess(processes, tools, {}) as process:
        return [(await process.call([ParsedCall("take", {"way": way})]))[0] for way in ways]


def servers(file: Path) -> int:
    """Return how many processes of the server live."""
    found = 0
    for each in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            found += each.name.isdecimal() and os.fsencode(file) in (each / "cmdline").read_bytes()
    return found


@pytest.mark.long
@pytest.mark.parametrize(("way", "outcome", "text"), ENDS, ids=[way for way, _, _ in ENDS])
async def test_what_a_server_does_ends_its_own_call_and_leaves_no_process(
    processes: AgentProcesses, file: Path, caplog: pytest.LogCaptureFixture, way: str, outcome: str, text: str
) -> None:
    end, again = await take(processes, way, "fine")
    assert (end.outcome, bool(re.search(text, end.text))) == (outcome, True), end
    assert again.outcome == "ok", again
    await until(lambda: not servers(file))
    assert not [record for record in caplog.records if "Traceback" in str(vars(record))]


@pytest.mark.long
@pytest.mark.parametrize(("listing", "words"), LISTS)
async def test_a_server_that_does_not_list_its_tools_is_refused_by_name(file: Path, listing: str, words: str) -> None:
    processes = AgentProcesses([McpServer(command=[sys.executable, str(file), listing])])
    with pytest.raises(RefusedError, match=words):
        await processes.open()
    await processes.close()


@pytest.mark.long
async def test_tools_of_all_pages_are_listed_and_odd_names_can_travel(file: Path) -> None:
    for listing, names in (("pages", ["take1", "take2", "take3"]), ("half", ["a\N{REPLACEMENT CHARACTER}"])):
        processes = AgentProcesses([McpServer(command=[sys.executable, str(file), listing])])
        assert [tool.name for tool in await processes.open()] == names
        await processes.close()


@pytest.mark.long
@pytest.mark.parametrize(
    ("body", "kind"), [(b"{", "application/json"), (b"data: {\n\n", "text/event-stream"), (b"null", "application/json")]
)
async def test_a_server_over_http_that_sends_no_message_leaves_no_traceback_in_the_log(
    caplog: pytest.LogCaptureFixture, body: bytes, kind: str
) -> None:
    async def rpc(request: web.Request) -> web.Response:
        asked = await request.json()
        if "id" not in asked:
            return web.Response(status=202)
        if asked["method"] == "tools/call":
            return web.Response(body=body, content_type=kind)
        result: dict[str, Any] = {"tools": [{"name": "take", "inputSchema": {"type": "object"}}]}
        if asked["method"] == "initialize":
            result = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}}}
            result["serverInfo"] = {"name": "s", "version": "1"}
        return web.json_response({"jsonrpc": "2.0", "id": asked["id"], "result": result})

    async with served(web.post("/mcp", rpc)) as url:
        processes = AgentProcesses([McpServer(f"{url}/mcp", timeout_s=5.0)])
        (end,) = await take(processes, "any")
        await processes.close()
    assert end.outcome in ("error", "timeout", "killed")
    assert not [record for record in caplog.records if "Traceback" in str(vars(record))]


def session_of(chat_formats: ChatFormats, generate: Any) -> EndpointSession:
    prompt = make_prompt(n=1, sampling=Sampling(max_tokens=4000), prompt="", prompt_ids=b"", ground_truth="")
    return EndpointSession(prompt, generate, chat_formats, 100)


@pytest.mark.long
async def test_large_bodies_of_one_sample_wait_for_each_other_and_delay_no_other_sample(
    chat_formats: ChatFormats,
) -> None:
    answered, held = asyncio.Event(), 0
    body = json.dumps({"messages": [{"role": "user", "content": "a"}], "metadata": {"a": "b" * (3 << 20)}}).encode()

    async def generate(ids: Any, max_tokens: Any = None, stop: Any = (), chat: Any = None) -> FinishedSample:
        nonlocal held
        held += 1
        await answered.wait()
        return FinishedSample([4, chat_formats.tokenizer.eos_token_id], [-1.0, -1.0], [(0, 1, 0)], "stop", 0.0)

    async def at_once(ids: Any, max_tokens: Any = None, stop: Any = (), chat: Any = None) -> FinishedSample:
        return FinishedSample([4, chat_formats.tokenizer.eos_token_id], [-1.0, -1.0], [(0, 1, 0)], "stop", 0.0)

    greedy, modest = session_of(chat_formats, generate), session_of(chat_formats, at_once)
    async with EndpointServer() as server, httpx.AsyncClient(timeout=60) as client:
        with server.serving(greedy) as key, server.serving(modest) as other:

            async def post(key: str) -> int:
                headers = {"Authorization": f"Bearer {key}"}
                return (await client.post(f"{server.url}/chat/completions", content=body, headers=headers)).status_code

            posts = [asyncio.create_task(post(key)) for _ in range(12)]
            await until(lambda: held == 5)  # 16 MiB
            assert await post(other) == 200
            assert held == 5
            answered.set()
            assert await asyncio.gather(*posts) == [200] * 12
            answered.clear()
            posts = [asyncio.create_task(post(key)) for _ in range(12)]
            await until(lambda: held == 17)
        assert set(await asyncio.gather(*posts)) <= {400, 499, 500}  # those that waited are not generated any more
        assert held == 17


async def test_a_connection_whose_headers_have_no_end_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_HEAD_WITHIN_S", 0.2)
    async with EndpointServer() as server:
        host, port = server.url.removeprefix("http://").removesuffix("/v1").split(":")
        for sent in (b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            assert await asyncio.wait_for(reader.read(), 60) == b""
            writer.close()
