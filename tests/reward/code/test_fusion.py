"""A Sandbox Fusion server, and one that has all the troubles a server can have."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from plaudit_job.rules.arguments import CodeOptions
from plaudit_reward.code.scorer import CodeScorer
from plaudit_reward.scorer import Attempt, Score
from plaudit_wire.errors import DataError, InfrastructureError, ScoreTimeoutError
from plaudit_wire.records import Sample

Answer = tuple[int, dict[str, str], Any]
TROUBLE: Answer = (503, {"Retry-After": "0"}, {})
ADD = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
SUMS = {"inputs": ["1 2", "3 4"], "outputs": ["3", "7\n"]}


@dataclass
class Server:
    """Speaks Sandbox Fusion's API over HTTP: runs the code in a process; first gives the answers it is told to."""

    first: list[Answer | None] = field(default_factory=list)
    """None: the connection is cut."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    broken_by: dict[str, Answer | None] = field(default_factory=dict)
    """Answers to code that holds a text, however often it is sent."""
    connections: list[Any] = field(default_factory=list)
    at_a_time: int = 0
    most_at_a_time: int = 0
    slow: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.slow.set()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(asyncio.current_task())
        try:
            while (head := await reader.readuntil(b"\r\n\r\n")).startswith(b"POST /run_code "):
                length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-le"))
                self.requests.append(json.loads(await reader.readexactly(length)))
                broken = [answer for text, answer in self.broken_by.items() if text in self.requests[-1]["code"]]
                first = [*self.first[:1], *broken]
                del self.first[:1]
                answer = first[0] if first else await self.run(self.requests[-1])
                if answer is None:
                    break
                status, headers, body = answer
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(content)}"]
                lines += [f"{name}: {value}" for name, value in headers.items()]
                writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + content)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def run(self, asked: dict[str, Any]) -> Answer:
        self.at_a_time += 1
        self.most_at_a_time = max(self.most_at_a_time, self.at_a_time)
        await self.slow.wait()
        ran = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-S", "-c", asked["code"]],
            input=asked["stdin"],
            capture_output=True,
            text=True,
        )
        self.at_a_time -= 1
        result = {"status": "Finished", "execution_time": 0.1, "return_code": ran.returncode}
        result |= {"stdout": ran.stdout, "stderr": ran.stderr}
        status = "Success" if ran.returncode == 0 else "Failed"
        return 200, {}, {"status": status, "message": "", "compile_result": None, "run_result": result, "files": {}}


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    listening = await asyncio.start_server(server.connected, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
    async with listening:
        yield server
        await asyncio.gather(*server.connections)


@pytest.fixture
async def score(server: Server) -> AsyncIterator[Callable[..., Awaitable[Score]]]:
    opened: list[CodeScorer] = []

    async def run(response: str, ground_truth: Any = SUMS, attempt: Attempt | None = None, **options: Any) -> Score:
        arguments = {"url": server.url, "timeSeconds": 5, **options}  # type: ignore[attr-defined]
        opened.append(CodeScorer("code", CodeOptions.read(arguments), processes=1))
        await opened[-1].open()
        sample = Sample("t-0-1.0", 0, "codecontests", "", response, ground_truth=ground_truth)
        return await opened[-1].score(sample, attempt or Attempt(60.0))

    yield run
    for scorer in opened:
        await scorer.close()


async def test_programs_functions_and_asserts_are_scored_by_their_cases(score: Callable[..., Awaitable[Score]]) -> None:
    functions = {"fn_name": "f", "inputs": ["[1, 2]\n3", "[4]\n5"], "outputs": ["[6]", "[9]"]}
    asserts = {"assert_case": ["assert f([1], 2) == [3]", "assert f([1], 2) == [4]"]}
    function = "```python\nclass Solution:\n    def f(self, a: List[int], b): return [sum(a) + b]\n```"
    assert (await score(ADD)).value == 1.0
    assert (await score(ADD.replace("+", "*"))).value == 0.0
    assert (await score(ADD.replace("a + b", "3"))).extra["failure"] == "case 1: wrong answer"
    assert (await score(function, functions)).value == 1.0
    assert (await score(function.replace("+ b", "+ 3"), functions)).value == 0.5
    assert (await score("```python\ndef f(a, b): return [a[0] + b]\n```", asserts)).value == 0.5
    assert (await score("no program")).extra == {"failure": "the response has no code block"}
    failed = await score("```\nint(input())\n```")
    assert (failed.value, str(failed.extra["failure"])[:26]) == (0.0, "case 0: raised: ValueError")


async def test_trouble_that_passes_changes_no_score(server: Server, score: Callable[..., Awaitable[Score]]) -> None:
    one = {"inputs": ["1 2"], "outputs": ["3"]}
    for server.first in ([TROUBLE, None], [(200, {}, b"<html>"), (429, {"Retry-After": "0"}, {})]):
        assert (await score(ADD, one)).value == 1.0
    assert len(server.requests) == 6


@pytest.mark.parametrize(
    "trouble", [TROUBLE, None, (200, {}, b"<html>"), (200, {}, {"status": "SandboxError", "message": "no pods"})]
)
async def test_trouble_that_stays_is_no_wrong_answer(
    server: Server, score: Callable[..., Awaitable[Score]], trouble: Answer | None
) -> None:
    server.first = [trouble] * 20
    with pytest.raises(InfrastructureError, match="Sandbox Fusion"):
        await score(ADD)


async def test_a_server_that_refuses_also_a_good_program_is_a_data_error(
    server: Server, score: Callable[..., Awaitable[Score]]
) -> None:
    server.first = [(422, {}, {"detail": "code is too long"})] * 20
    with pytest.raises(DataError, match=r"refused the program with 422: .*code is too long"):
        await score(ADD)


@pytest.mark.parametrize(
    "trouble", [None, (500, {}, {}), (422, {}, {}), (200, {}, b"<html>"), (200, {}, {"status": "SandboxError"})]
)
async def test_a_program_that_breaks_the_server_each_time_is_wrong(
    server: Server, score: Callable[..., Awaitable[Score]], trouble: Answer | None
) -> None:
    server.broken_by = {"# attack": trouble}
    result = await score(ADD.replace("print", "# attack\nprint"))
    assert (result.value, str(result.extra["failure"])[:15]) == (0.0, "case 0: crashed")
    assert (await score(ADD)).value == 1.0


ASSERTS = {
    "assert_case": ["assert f(3) == 9", "x = [3]\nassert abs(f(*x) - 9) < 1e-9 and f(4) == 16", "assert not f(0)"],
}


@pytest.mark.long
async def test_asserts_are_decided_as_in_the_local_sandbox(
    server: Server, score: Callable[..., Awaitable[Score]]
) -> None:
    always = "class A(int):\n    def __eq__(self, other): return True\ndef f(x): return A()"
    assert (await score("```python\ndef f(x): return x * x\n```", ASSERTS)).value == 1.0
    assert not any("== 9" in asked["code"] for asked in server.requests if "return x" in asked["code"])
    for wrong in (
        "import os\ndef f(x): return 5\nos._exit(0)",
        "def f(x): return 5\nraise SystemExit",
        "import os\nos.write(1, b'{\"passed\": true}')\nos._exit(0)",
        f"{always} if x else True",
        "import atexit, os\natexit.register(os._exit, 0)\nraise ValueError",
    ):
        assert (await score(f"```python\n{wrong}\n```", ASSERTS)).value == 0.0


@pytest.mark.parametrize(
    ("compiled", "ran", "failure"),
    [
        (None, {"status": "TimeLimitExceeded"}, "time limit"),
        ({"status": "Error", "stderr": "x\nerror: no ;"}, None, "raised: error: no ;"),
        ({"status": "TimeLimitExceeded"}, None, "time limit"),
    ],
)
async def test_the_servers_verdicts_are_reported(
    server: Server, score: Callable[..., Awaitable[Score]], compiled: Any, ran: Any, failure: str
) -> None:
    server.first = [(200, {}, {"status": "Failed", "compile_result": compiled, "run_result": ran})] * 2
    result = await score(ADD)
    assert (result.value, result.extra["failure"]) == (0.0, f"case 0: {failure}")


async def test_more_output_than_allowed_is_not_read(server: Server, score: Callable[..., Awaitable[Score]]) -> None:
    server.first = [(200, {}, b" " * (1 << 20))] * 2
    assert (await score(ADD, output="1Ki")).extra["failure"] == "case 0: output limit"


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "truth"),
    [("print(chr(1) * (8 << 20))", SUMS), ("def f(x): return chr(1) * (8 << 20)", ASSERTS)],
    ids=["printed", "assert"],
)
async def test_a_response_that_would_stall_the_event_loop_is_not_read(
    server: Server, score: Callable[..., Awaitable[Score]], program: str, truth: Any
) -> None:
    flood = f"```python\n{program}\n```"
    assert (await score(flood, truth)).extra["failure"] == "case 0: output limit"


async def test_a_response_of_endless_depth_is_the_servers_fault(
    server: Server, score: Callable[..., Awaitable[Score]]
) -> None:
    deep = b'{"status": "Success", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    server.first = [(200, {}, deep)]
    assert (await score(ADD)).value == 1.0


async def test_waiting_for_a_place_is_no_work(server: Server, score: Callable[..., Awaitable[Score]]) -> None:
    cases = {"inputs": ["1 2"] * 10, "outputs": ["3"] * 10}
    assert (await score(ADD, cases, concurrency=2)).value == 1.0
    assert server.most_at_a_time == 2


async def test_the_samples_time_ends_a_server_that_hangs(
    server: Server, score: Callable[..., Awaitable[Score]]
) -> None:
    server.slow.clear()
    with pytest.raises(ScoreTimeoutError, match=r"longer than 0\.2 s"):
        await score(ADD, attempt=Attempt(0.2))
    server.slow.set()
