"""``kind: tools`` over a scripted engine: real processes, vLLM's real parser, token ids end to end."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import asynccontextmanager

import numpy as np
import pytest
import pytest_asyncio

from episodes import call
from plaudit_wire.errors import RefusedError
from plaudit_wire.messages import Sampling
from plaudit_wire.records import AgentReward
from plaudit_workers.agents.messages import FunctionTool, McpServer, VerlTools
from plaudit_workers.agents.processes import AgentProcesses
from plaudit_workers.rollout.agents.tool_calls import ParsedCall, ToolCallParser
from plaudit_workers.rollout.agents.tools import ToolAgent, ToolLimits, ToolProcess
from plaudit_workers.rollout.scripted import Constant, Script, ScriptedEngine
from plaudit_workers.stream.transport import Transport
from plaudit_workers.tokenizer import ChatTemplate
from waiting import until

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # vLLM and torch warn when they are imported
    pytest.mark.asyncio(loop_scope="module"),  # the tests share the template process, and so the event loop
]

TOOLS = '''
import os, signal, sys, time


def look_up(key: str) -> str:
    """Look a key up.

    Args:
        key: what to look up
    """
    return f"value of {key}"


async def slowly(key: str) -> dict:
    """Look a key up in the background.

    Args:
        key: what to look up
    """
    import asyncio
    await asyncio.sleep(0.01)
    return {"key": key}


def rewarded(key: str):
    """Look a key up and judge it.

    Args:
        key: what to look up
    """
    return f"found {key}", 0.25


def raises(key: str) -> str:
    """Raise.

    Args:
        key: what to look up
    """
    raise KeyError(key)


def hangs(key: str) -> str:
    """Hang.

    Args:
        key: what to look up
    """
    time.sleep(60)


def crashes(key: str) -> str:
    """Crash.

    Args:
        key: what to look up
    """
    os.kill(os.getpid(), signal.SIGSEGV)


def floods(key: str) -> str:
    """Return too much.

    Args:
        key: what to look up
    """
    print("x" * 100_000)
    return "abc" * 1_000_000


def secret(key: str) -> str:
    """Look for a secret.

    Args:
        key: what to look up
    """
    return os.environ.get(key, "nothing")


def undescribed(key): return key
'''
NAMES = ("look_up", "slowly", "rewarded", "raises", "hangs", "crashes", "floods", "secret")


@pytest_asyncio.fixture(loop_scope="module")
async def transport(address, run_name):
    transport = await Transport.open(address, run_name)
    yield transport
    await transport.close()


@pytest_asyncio.fixture(loop_scope="module")
async def run(transport, run_class, tmp_path):
    return await run_class.begin(transport, tmp_path / "weights")


@pytest.fixture(scope="module")
def tool_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tools") / "my_tools.py"
    path.write_text(TOOLS)
    return str(path)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tool_file):
    """The processes of the file's functions; ``hangs`` has 0.3 s. The rollout has a secret in its environment."""
    processes = AgentProcesses([FunctionTool(tool_file, name, 0.3 if name == "hangs" else 20.0) for name in NAMES])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLAUDIT_REDIS_PASSWORD", "hidden")
        await processes.open()
    yield processes
    await processes.close()


@pytest.fixture
def open_agent(tokenizer, shared):
    """Opens a tool agent with the file's functions, or with a template process of its own for other sources."""

    @asynccontextmanager
    async def opened(sources=None, **limits):
        processes = AgentProcesses(sources) if sources else shared
        try:
            tools = await processes.open()
            template = ChatTemplate(tokenizer, [tool.schema for tool in tools])
            parser = ToolCallParser("hermes", tokenizer, template.tools)
            yield ToolAgent(template, parser, processes, tools, ToolLimits(**limits))
        finally:
            if processes is not shared:
                await processes.close()

    return opened


@pytest.fixture
def hold(run, start_worker, tokenizer):
    """Runs samples of one prompt through a worker; returns them as the trainer reads them."""

    async def held(agent, *turns: str, n: int = 1, max_tokens: int = 4000, **changes):
        await run.announce(0)
        messages = [{"role": "user", "content": "Look it up."}]
        ids = agent.template.encode(agent.template.render(messages, generate=True))
        await run.admit(
            "t-0-1.0",
            n=n,
            sampling=Sampling(max_tokens=max_tokens),
            prompt_ids=np.asarray(ids, "<i4").tobytes(),
            messages=messages,
            **changes,
        )
        engine = ScriptedEngine(Script(Constant(0.01), turns=list(turns)), tokenizer=tokenizer)
        async with start_worker(engine, agent=agent):
            group = await run.published("t-0-1.0", n)
        return ids, [sample.body for sample in group.samples]

    return held


async def test_a_sample_calls_tools_and_reads_their_results(open_agent, hold, tokenizer) -> None:
    turns = (call("look_up", key="a") + "\n" + call("slowly", key="b"), call("look_up", key="c"), "It is c.")
    async with open_agent() as agent:
        prompt_ids, (body,) = await hold(agent, *turns)
    sample = body.sample
    assert [message["role"] for message in sample.completion] == [
        "assistant",
        "tool",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert [message["content"] for message in sample.completion if message["role"] == "tool"] == [
        "value of a",
        '{"key": "b"}',
        "value of c",
    ]
    assert (sample.answer, sample.num_turns) == ("It is c.", 6)
    ids = np.frombuffer(body.response_ids, "<i4")
    mask = np.frombuffer(body.loss_mask, "u1") != 0
    eos = tokenizer.eos_token_id
    assert tokenizer.decode(ids[mask]) == "<|im_end|>".join([*turns, ""])
    # The ids that are trained are those of the rendered conversation, read as a whole.
    conversation = [{"role": "user", "content": "Look it up."}, *sample.completion]
    whole = agent.template.encode(agent.template.render(conversation, generate=False).removesuffix("\n"))
    assert [*prompt_ids, *ids.tolist()] == whole
    assert ids[-1] == eos
    turn_records = body.generation.turns
    assert [[(c.tool, c.outcome) for c in turn.calls] for turn in turn_records] == [
        [("look_up", "ok"), ("slowly", "ok")],
        [("look_up", "ok")],
        [],
    ]
    assert [int(mask[turn.first]) for turn in turn_records] == [1, 1, 1]
    assert body.generation.tool_s > 0


async def test_a_row_may_use_only_the_tools_that_it_selects(open_agent, hold) -> None:
    turns = call("slowly", key="a"), call("look_up", key="b"), "Well."
    async with open_agent() as agent:
        _, (body,) = await hold(agent, *turns, extra_info={"tool_selection": ["secret", "look_up"]})
        results = [message["content"] for message in body.sample.completion if message["role"] == "tool"]
        assert results == ["Error: there is no tool 'slowly'; the tools are secret, look_up", "value of b"]
        assert [tool["function"]["name"] for tool in agent.template.tools] == list(NAMES)


MISHAPS = [
    (call("raises", key="a"), "KeyError: 'a'", "error"),
    (call("look_up", wrong="a"), "TypeError: look_up() got an unexpected keyword", "error"),
    (call("absent"), "Error: there is no tool 'absent'; the tools are", "refused"),
    ('<tool_call>{"name": "look_up", "arguments": [1]}</tool_call>', "Error: the arguments are not", "refused"),
    (call("look_up", key=10**30), "Error: arguments.key: is an integer beyond 64 bits", "refused"),
    (call("look_up", key=json.loads("[" * 90 + "]" * 90)), "Error: arguments.key[0][0]", "refused"),
    (call("look_\\ud800"), "Error: there is no tool 'look_\ufffd'", "refused"),
    (call("hangs", key="a"), "hangs gave no result within 0.3 s", "timeout"),
    (call("crashes", key="a"), "the process that ran crashes was killed by SIGSEGV", "killed"),
    (call("floods", key="a"), "abcabc", "ok"),
    (call("secret", key="PLAUDIT_REDIS_PASSWORD"), "nothing", "ok"),
    (call("look_up", key="a"), "value of a", "ok"),
]
"""Turn of the policy, what it reads then, outcome of the call."""


async def test_the_model_reads_the_error_of_a_tool_and_continues(open_agent, hold) -> None:
    async with open_agent(result_tokens=130, turns=20) as agent:
        _, (body,) = await hold(agent, *(turn for turn, _, _ in MISHAPS), "Well.")
        results = [message["content"] for message in body.sample.completion if message["role"] == "tool"]
        assert all(len(agent.template.encode(result)) <= 160 for result in results)
    for (_, text, _), result in zip(MISHAPS, results, strict=True):
        assert text in result
    assert [c.outcome for turn in body.generation.turns for c in turn.calls] == [outcome for _, _, outcome in MISHAPS]
    assert (body.sample.answer, body.sample.failure) == ("Well.", None)


@pytest.mark.parametrize(("name", "outcome"), [("hangs", "timeout"), ("crashes", "infra_error")])
async def test_a_tool_failure_can_fail_the_sample(open_agent, hold, name, outcome) -> None:
    async with open_agent(fail_on_tool_failure=True) as agent:
        _, (body,) = await hold(agent, call(name, key="a"), "Well.")
    assert body.sample.failure is not None
    assert (body.sample.failure.outcome, body.sample.failure.value) == (outcome, None)


async def test_a_failing_tool_costs_its_own_sample_only(open_agent, tokenizer) -> None:
    async with open_agent() as agent:
        hanging = await agent.processes.fork()
        other = await agent.processes.fork()
        hanging.kill("was killed")
        assert not other.died.done()
        other.close()


async def test_rewards_of_tools_are_summed_and_kept_apart(open_agent, hold) -> None:
    turn = call("rewarded", key="a") + call("look_up", key="b") + call("rewarded", key="c")
    async with open_agent() as agent:
        _, (body,) = await hold(agent, turn, "Done.")
    assert body.sample.tool_rewards == [0.25, 0.25]
    assert body.sample.agent_reward == AgentReward("scored", 0.5)


@pytest.mark.parametrize(
    ("limits", "max_tokens", "outcomes", "finish"),
    [
        ({"turns": 2}, 4000, ["ok"], "stop"),
        ({"calls": 2}, 4000, ["ok", "ok", "refused"], "stop"),
        ({}, 300, ["ok", "ok"], "length"),
    ],
)
async def test_a_conversation_ends_at_its_limits(open_agent, hold, limits, max_tokens, outcomes, finish) -> None:
    turn = call("look_up", key="a")
    async with open_agent(**limits) as agent:
        _, (body,) = await hold(agent, turn, turn, turn, "Done.", max_tokens=max_tokens)
    done = [c.outcome for turn in body.generation.turns for c in turn.calls]
    assert done == outcomes
    assert body.sample.finish_reason == finish
    assert body.generation.response_tokens <= max_tokens


async def test_only_the_first_calls_of_a_turn_are_run(open_agent, hold) -> None:
    turn = "".join(call("look_up", key=key) for key in "abc")
    async with open_agent(calls_per_turn=2) as agent:
        _, (body,) = await hold(agent, turn, "Done.")
    results = [message["content"] for message in body.sample.completion if message["role"] == "tool"]
    assert results == ["value of a", "value of b", "Error: only 2 calls are run in one turn"]
    assert [c.outcome for c in body.generation.turns[0].calls] == ["ok", "ok", "refused"]


async def test_a_turn_that_reaches_its_limit_of_tokens_ends_the_sample(open_agent, hold) -> None:
    turn = call("look_up", key="a")
    async with open_agent(turn_tokens=100) as agent:
        _, (body,) = await hold(agent, turn, "x" * 300, "Done.")
    assert [turn.tokens for turn in body.generation.turns][1:] == [100]
    assert body.sample.finish_reason == "length"


async def test_a_sample_that_takes_too_long_ends_as_a_timeout(open_agent, hold) -> None:
    async with open_agent(seconds=0.5) as agent:
        agent.tools = {name: replace_timeout(tool) for name, tool in agent.tools.items()}
        _, (body,) = await hold(agent, call("hangs", key="a"))
    assert body.sample.failure == AgentReward("timeout", reason="the conversation took longer than 0.5 s")


async def test_a_sample_whose_time_ends_before_its_first_token_is_a_timeout_too(open_agent, hold) -> None:
    async with open_agent(seconds=0.0) as agent:
        _, (body,) = await hold(agent, "Done.")
    assert body.sample.failure == AgentReward("timeout", reason="the conversation took longer than 0 s")
    assert (body.sample.response_tokens, body.sample.completion) == (1, [])


async def test_verl_classes_are_created_executed_and_released_around_each_call(open_agent, hold, tmp_path) -> None:
    (tmp_path / "verl_style.py").write_text(
        "class Count:\n"
        "    def __init__(self, config, tool_schema):\n"
        "        self.config, self.log = config, []\n"
        "    async def create(self, instance_id=None, **kwargs):\n"
        "        self.log.append(('create', kwargs['create_kwargs'].get('truth')))\n"
        "        return 'instance-1', None\n"
        "    async def execute(self, instance_id, parameters, **kwargs):\n"
        "        self.log.append(('execute', instance_id))\n"
        "        return str([self.config['start'] + parameters['by'], self.log]), 0.5, {}\n"
        "    async def release(self, instance_id, **kwargs):\n"
        "        self.log.append(('release', instance_id))\n"
    )
    (tmp_path / "tools.yaml").write_text(
        "tools:\n"
        "  - class_name: verl_style.Count\n"
        "    config: {start: 3, type: native}\n"
        "    tool_schema:\n"
        "      type: function\n"
        "      function:\n"
        "        name: count\n"
        "        description: Count on.\n"
        "        parameters: {type: object, properties: {by: {type: integer, description: how far}}, required: [by]}\n"
    )
    kwargs = {"tools_kwargs": {"count": {"create_kwargs": {"truth": "7"}}}}
    async with open_agent(sources=[VerlTools(str(tmp_path / "tools.yaml"))]) as agent:
        _, (body,) = await hold(agent, call("count", by=1), call("count", by=2), "5", extra_info=kwargs)
    first, second = (message["content"] for message in body.sample.completion if message["role"] == "tool")
    assert first == str([4, [("create", "7"), ("execute", "instance-1")]])
    assert second.startswith("[5, [('create', '7'), ('execute', 'instance-1'), ('release', 'instance-1'), ('create'")
    assert body.sample.tool_rewards == [0.5, 0.5]


@pytest.mark.parametrize("written", [5, {"count": 5}, {"count": {"create_kwargs": [5]}}])
async def test_arguments_of_create_in_another_form_cost_their_sample(open_agent, hold, written) -> None:
    async with open_agent() as agent:
        _, (body,) = await hold(agent, "5", extra_info={"tools_kwargs": written})
    assert body.sample.failure.outcome == "data_error"
    assert body.sample.failure.reason.startswith(f"extra_info.tools_kwargs is {written}; give {{tool: ")


MCP_SERVER = """
import os

from mcp.server import MCPServer

server = MCPServer("numbers")
count = 0
output = os.dup(1)


@server.tool()
def add(a: int, b: int) -> str:
    "Add two numbers and count the calls."
    global count
    count += 1
    return f"{a + b}, call {count}"


@server.tool()
def refuse() -> str:
    "Raise."
    raise ValueError("not today")


@server.tool()
def flood() -> str:
    "Write a gigabyte that is no line."
    for _ in range(1024):
        os.write(output, b"x" * (1 << 20))


server.run()
"""


@pytest.mark.long
async def test_the_tools_of_an_mcp_server_are_called_in_a_session_of_each_sample(open_agent, hold, tmp_path) -> None:
    (tmp_path / "numbers_server.py").write_text(MCP_SERVER)
    source = McpServer(command=[sys.executable, str(tmp_path / "numbers_server.py")])
    async with open_agent(sources=[source]) as agent:
        assert sorted(agent.tools) == ["add", "flood", "refuse"]
        turns = call("add", a=1, b=2), call("add", a=3, b=4), call("refuse"), call("flood"), call("add", a=0, b=0)
        _, bodies = await hold(agent, *turns, "Done.", n=2)
    for body in bodies:
        texts = [message["content"] for message in body.sample.completion if message["role"] == "tool"]
        assert texts[:2] == ["3, call 1", "7, call 2"]
        assert "refuse" in texts[2]
        assert texts[3].endswith(": a line of its output is longer than 4194304 bytes")
        assert texts[4] == "0, call 1"
        assert [c.outcome for turn in body.generation.turns for c in turn.calls] == [
            "ok",
            "ok",
            "error",
            "killed",
            "ok",
        ]


async def test_an_mcp_server_that_does_not_start_is_refused(open_agent) -> None:
    with pytest.raises(RefusedError, match="MCP server /nowhere/server cannot be used: FileNotFoundError"):
        async with open_agent(sources=[McpServer(command=["/nowhere/server"])]):
            pass


@pytest.mark.long
async def test_tools_that_cannot_be_described_are_refused(open_agent, tool_file) -> None:
    for name, message in (("undescribed", "type hint"), ("absent", "it defines crashes, floods")):
        with pytest.raises(RefusedError, match=message):
            async with open_agent([FunctionTool(tool_file, name)]):
                pass


async def test_samples_in_tools_leave_their_places_in_the_engine(open_agent, run, start_worker, tokenizer):
    async with open_agent() as agent:
        agent.tools = {name: replace_timeout(tool) for name, tool in agent.tools.items()}
        await run.announce(0)
        engine = ScriptedEngine(Script(Constant(0.01), turns=[call("hangs", key="a")]), tokenizer=tokenizer)
        for number in range(6):
            await run.admit(f"t-{number}-1.0", n=1, sampling=Sampling(max_tokens=4000))
        sizes = {"max_concurrent_samples": 1, "max_samples_in_agents": 4, "samples_per_prompt": 1}
        async with start_worker(engine, agent=agent, drain_grace_s=0.0, **sizes) as (worker, _):

            async def busy() -> bool:
                return worker.busy >= 5

            await until(busy)
            assert worker.busy <= 6


async def test_a_sample_that_is_cancelled_at_any_moment_leaves_its_tool_at_once(open_agent):
    async with open_agent() as agent:
        tools = {"hangs": replace_timeout(agent.tools["hangs"])}
        for turns in range(20):
            async with ToolProcess(agent.processes, tools, {}) as process:
                calling = asyncio.create_task(process.call([ParsedCall("hangs", {"key": "a"})]))
                for _ in range(turns):
                    await asyncio.sleep(0)
                assert not calling.done()
                calling.cancel()
                await asyncio.wait([calling], timeout=30)
                assert calling.cancelled(), turns


def replace_timeout(tool):
    return type(tool)(tool.name, tool.schema, 60.0)


async def test_a_conversation_without_a_call_counts_as_one_of_two_turns(open_agent, hold) -> None:
    async with open_agent() as agent:
        _, (body,) = await hold(agent, "I know it.")
    assert [(turn.first, turn.calls) for turn in body.generation.turns] == [(0, [])]
    assert body.sample.num_turns == 2


async def test_arguments_that_no_parser_can_read_stay_text(open_agent) -> None:
    async with open_agent() as agent:
        deep = '<tool_call>{"name": "look_up", "arguments": ' + "[" * 100_000 + "</tool_call>"
        assert agent.parser.parse(deep).calls == []


@pytest.mark.parametrize("side", ["left", "middle", "right"])
async def test_only_the_parts_of_a_long_result_that_stay_are_tokenised(open_agent, hold, side) -> None:
    read: list[int] = []
    async with open_agent(result_tokens=100, truncate=side) as agent:
        encode = agent.template.encode
        agent.template.encode = lambda text: read.append(len(text)) or encode(text)  # counts what is read
        _, (body,) = await hold(agent, call("floods", key="a"), "Well.")
    (result,) = (message["content"] for message in body.sample.completion if message["role"] == "tool")
    assert 100 < len(result) < 1500
    assert max(read) < 10_000
