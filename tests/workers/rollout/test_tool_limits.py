"""The limits of a conversation hold together, whatever the policy writes and however long the tools' results are."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import episodes
from chat_tokenizer import chat_tokenizer
from plaudit_workers.agents.messages import FunctionTool
from plaudit_workers.agents.processes import AgentProcesses
from plaudit_workers.rollout.agents.tool_calls import ToolCallParser
from plaudit_workers.rollout.agents.tools import ToolAgent, ToolLimits
from plaudit_workers.rollout.vllm_arguments import prepare_environment
from plaudit_workers.tokenizer import ChatTemplate

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # vLLM and torch warn when they are imported
    pytest.mark.asyncio(loop_scope="module"),  # the tests share the template process, and so the event loop
]

TOOL = '''
def repeat(text: str, times: int) -> str:
    """Repeat a text.

    Args:
        text: what to repeat
        times: how often
    """
    return text * times
'''
NOTE_TOKENS = 60
"""Room for the marks of the template around a result, and for the note that it was cut."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def processes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AgentProcesses]:
    prepare_environment("")  # as a rollout does before it imports vLLM
    path = tmp_path_factory.mktemp("tools") / "tools.py"
    path.write_text(TOOL)
    processes = AgentProcesses([FunctionTool(str(path), "repeat")])
    yield processes
    await processes.close()


def drawn_turn(draw: random.Random) -> str:
    """Return a turn with none to four calls, some of them invalid."""
    calls = []
    for _ in range(draw.choice([0, 1, 1, 1, 2, 4])):
        name = draw.choice(["repeat", "repeat", "repeat", "absent"])
        arguments: Any = {"text": draw.choice(["ab ", "ü🙂", "x"]), "times": draw.choice([1, 30, 3000])}
        calls.append({"name": name, "arguments": draw.choice([arguments, arguments, [1], {"text": 10**30}])})
    text = draw.choice(["", "I look.\n", "long " * 40])
    return text + "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
async def test_all_limits_hold_together_in_random_conversations(processes: AgentProcesses, seed: int) -> None:
    draw, tokenizer = random.Random(seed), chat_tokenizer()
    limits = ToolLimits(
        turns=draw.randrange(1, 6),
        turn_tokens=draw.choice([None, 40, 300]),
        calls_per_turn=draw.randrange(1, 4),
        calls=draw.randrange(1, 8),
        result_tokens=draw.choice([1, 8, 50]),
        truncate=draw.choice(["left", "middle", "right"]),
    )
    max_tokens = draw.choice([60, 400, 2000])
    tools = await processes.open()
    template = ChatTemplate(tokenizer, [tool.schema for tool in tools])
    agent = ToolAgent(template, ToolCallParser("hermes", tokenizer, template.tools), processes, tools, limits)
    turns = [drawn_turn(draw) for _ in range(8)]
    _, body = await episodes.play(agent, tokenizer, *turns, max_tokens=max_tokens)

    ids, mask = np.frombuffer(body.response_ids, "<i4"), np.frombuffer(body.loss_mask, "u1")
    records = body.generation.turns
    assert len(ids) == len(mask) == len(np.frombuffer(body.logprobs, "<f4")) <= max_tokens
    assert len(records) <= limits.turns
    assert all(record.tokens <= (limits.turn_tokens or max_tokens) for record in records)
    # Exactly the policy's turns are trained, and the log-probabilities of all other tokens are 0.
    expected = np.zeros(len(ids), dtype=np.uint8)
    for record in records:
        expected[record.first : record.first + record.tokens] = 1
    assert (mask == expected).all()
    assert (np.frombuffer(body.logprobs, "<f4")[mask == 0] == 0).all()
    # Calls beyond a limit are refused, and never run.
    run = [[call for call in record.calls if call.outcome != "refused"] for record in records]
    assert all(len(calls) <= limits.calls_per_turn for calls in run)
    assert sum(map(len, run)) <= limits.calls
    # Each call has a result of at most so many tokens, beside the note that it was cut.
    results = [message["content"] for message in body.sample.completion if message["role"] == "tool"]
    assert len(results) == sum(len(record.calls) for record in records)
    shown = [result for result in results if not result.startswith("Error: ")]
    assert all(len(template.encode(result)) <= limits.result_tokens + NOTE_TOKENS for result in shown)
    # What is published is a conversation that ended, or was cut at a limit of tokens.
    assert body.sample.finish_reason in ("stop", "length")
    if body.sample.finish_reason == "stop" and len(records) < limits.turns:
        assert records[-1].calls == []
