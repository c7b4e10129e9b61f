"""The doors of agents: requests of their programs, calls of tools by the policy, and what a tool returns."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outside_values import BODIES, TEXTS, VALUES, with_member
from plaudit_wire.messages import Sampling
from plaudit_wire.plain import PlainDataError, plain
from plaudit_workers.agents.messages import FunctionTool, ProcessLimits
from plaudit_workers.agents.processes import AgentProcesses
from plaudit_workers.rollout.agents.session import RequestError, parse_request
from plaudit_workers.rollout.agents.tool_calls import ParsedCall
from plaudit_workers.rollout.agents.tools import ToolProcess

quietly = settings(suppress_health_check=list(HealthCheck))
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "b"},
]
REQUEST = {"model": "m", "messages": MESSAGES[:1], "tools": [TOOL], "temperature": 1.0, "stop": "x", "max_tokens": 3}
CHANGED_MESSAGES = st.lists(st.sampled_from(MESSAGES).flatmap(with_member) | st.sampled_from(MESSAGES), max_size=3)
REQUESTS = (
    with_member(REQUEST)
    | CHANGED_MESSAGES.map(lambda messages: {**REQUEST, "messages": messages})
    | st.one_of(
        with_member(CALL), with_member(CALL["function"]).map(lambda function: {**CALL, "function": function})
    ).map(lambda call: {**REQUEST, "messages": [MESSAGES[0], {"role": "assistant", "tool_calls": [call]}]})
    | with_member(TOOL).map(lambda tool: {**REQUEST, "tools": [tool]})
)


@quietly
@given(BODIES | REQUESTS.map(lambda body: json.dumps(body).encode()))
def test_a_request_of_a_program_is_read_or_refused(body: bytes) -> None:
    with suppress(RequestError):
        request = parse_request(body, Sampling(max_tokens=8))
        msgspec.msgpack.encode((request.messages, request.stop, request.max_tokens))


TOOLS = '''
def answer(value: str):
    """Answer with the value of an expression.

    Args:
        value: the expression
    """
    return eval(value)


def count(number: int, names: list[str] | None = None):
    """Count.

    Args:
        number: a number
        names: some names
    """
    return number
'''
RETURNED = [
    "None", "object()", "10**400", "float('nan')", "'\\ud800'", "b'x'", "[[]] * 9", "{1: {2}}", "'x' * 10**6", "1 / 0",
    "__import__('os')._exit(3)", "lambda: 1", "(lambda f: f(f, 200))(lambda f, n: [f(f, n - 1)] if n else 1)",
]  # fmt: skip


def passes(arguments: dict[str, Any]) -> bool:
    """Return True for what the parser of calls lets through."""
    try:
        return bool(plain(arguments) == arguments)
    except PlainDataError:
        return False


ARGUMENTS = st.dictionaries(st.sampled_from(["number", "names", "value"]) | TEXTS, VALUES, max_size=2).filter(passes)
CALLS = st.builds(lambda value: ParsedCall("answer", {"value": value}), st.sampled_from(RETURNED)) | st.builds(
    ParsedCall, st.sampled_from(["count", "answer"]), ARGUMENTS
)
NEIGHBOUR = ParsedCall("count", {"number": 7})


@pytest.mark.long
def test_a_call_of_a_tool_ends_for_its_own_sample_alone(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)

    async def one(processes: AgentProcesses, tools: dict[str, Any], calls: list[ParsedCall]) -> None:
        async with ToolProcess(processes, tools, {}) as process, ToolProcess(processes, tools, {}) as other:
            for call in calls:
                (end,) = await asyncio.wait_for(process.call([call]), 60.0)
                assert isinstance(end.text, str)
                msgspec.msgpack.encode(end.text)
            (end,) = await asyncio.wait_for(other.call([NEIGHBOUR]), 60.0)
            assert end.text == "7"

    with asyncio.Runner() as runner:
        sources = [FunctionTool(str(tmp_path / "tools.py"), name, 5.0) for name in ("answer", "count")]
        processes = AgentProcesses(sources, limits=ProcessLimits())
        tools = {tool.name: tool for tool in runner.run(processes.open())}

        @quietly
        @given(st.lists(CALLS, min_size=1, max_size=3))
        def ends(calls: list[ParsedCall]) -> None:
            runner.run(one(processes, tools, calls))

        try:
            ends()
        finally:
            runner.run(processes.close())
