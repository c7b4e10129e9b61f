"""Open the agent of an environment as a rollout does, and let a scripted policy play one sample."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from builders import make_prompt
from plaudit_job.spec.rollout import AgentSpec, ToolSpec
from plaudit_reward.machines import RunMachines
from plaudit_wire.messages import PolicyVersion, SampleBody, Sampling
from plaudit_workers.agents.processes import AgentProcesses
from plaudit_workers.agents.sandbox_tools import sandbox_tools
from plaudit_workers.rollout.agents.agent import Agent, CustomAgent
from plaudit_workers.rollout.agents.machine_tools import MachineTools
from plaudit_workers.rollout.agents.tool_calls import ToolCallParser
from plaudit_workers.rollout.agents.tools import EnvironmentAgent, ToolAgent, ToolLimits
from plaudit_workers.rollout.prompt_work import SampleRun, sample_body
from plaudit_workers.rollout.scripted import Constant, Script, ScriptedEngine
from plaudit_workers.tokenizer import ChatTemplate


def call(name: str, **arguments: Any) -> str:
    """Return a policy's call of a tool, as Hermes writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@asynccontextmanager
async def served(*routes: web.AbstractRouteDef) -> AsyncIterator[str]:
    """Serve an application on loopback; yield its URL."""
    application = web.Application()
    application.add_routes(routes)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
    finally:
        await runner.cleanup()


async def open_agent(processes: AgentProcesses, tokenizer: Any, limit_s: float = 20.0, **limits: Any) -> Any:
    """Return the agent of an environment; the caller closes the processes."""
    tools = await processes.open()
    if processes.environment == "loop":
        return CustomAgent(processes, limit_s)
    template = ChatTemplate(tokenizer, [tool.schema for tool in tools])
    parser = ToolCallParser("hermes", tokenizer, template.tools)
    chat = (template, parser, processes, tools, ToolLimits(fail_on_tool_failure=True, **limits))
    return EnvironmentAgent(*chat, reads_text=processes.environment == "text", step_limit_s=limit_s)


def machine_agent(machines: RunMachines, processes: AgentProcesses, tokenizer: Any, timeout_s: float) -> ToolAgent:
    """Return an agent whose calls of ``bash`` and of the files' tools run in machines."""
    tools = [ToolSpec(sandbox="bash", timeout_seconds=timeout_s), ToolSpec(sandbox="files")]
    described = sandbox_tools(AgentSpec(kind="tools", tools=tools))
    template = ChatTemplate(tokenizer, [tool.schema for tool in described])
    parser = ToolCallParser("hermes", tokenizer, template.tools)
    limits = ToolLimits(turns=20, fail_on_tool_failure=True)
    return ToolAgent(template, parser, processes, described, limits, MachineTools(machines, described, 2))


async def play(
    agent: Agent, tokenizer: Any, *turns: str, max_tokens: int = 2000, **changes: Any
) -> tuple[list[int], SampleBody]:
    """Run one sample of a policy that writes ``turns``; return the prompt's ids and the published body."""
    messages = [{"role": "user", "content": "Play."}]
    template = ChatTemplate(tokenizer, getattr(getattr(agent, "template", None), "tools", ()))
    ids = template.encode(template.render(messages, generate=True))
    fields: dict[str, Any] = {
        "seed": 5,
        "sampling": Sampling(max_tokens=max_tokens),
        "data_source": "game",
        "prompt": template.render(messages, generate=True),
        "prompt_ids": np.asarray(ids, "<i4").tobytes(),
        "ground_truth": "6",
        "messages": messages,
    }
    prompt = make_prompt(n=1, **{**fields, **changes})
    engine = ScriptedEngine(Script(Constant(0.001), turns=list(turns)), tokenizer=tokenizer)
    await engine.load_weights(Path("none"), PolicyVersion(1, 0))
    run = SampleRun(prompt, 0, engine, lambda change: None)
    trajectory = await run.run(agent)
    return ids, sample_body(prompt, 0, trajectory, run.record("rollout-0", trajectory, None), engine)
