"""Build the engine and the agent of a job. Called by ``worker``; heavy packages are imported only where needed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from plaudit_wire.logs import get_logger
from plaudit_workers.agent_processes.processes import AgentProcesses
from plaudit_workers.agent_processes.sources_of import sources_of
from plaudit_workers.job.spec.rljob import RLJob
from plaudit_workers.rollout.agents.agent import Agent
from plaudit_workers.rollout.agents.chat.suffix import REWRITES
from plaudit_workers.rollout.agents.custom import CustomAgent
from plaudit_workers.rollout.agents.single_turn import SingleTurn
from plaudit_workers.rollout.engines.protocol import Engine
from plaudit_workers.rollout.replica import WHOLE, ReplicaMember

logger = get_logger(__name__)


def _vllm(job: RLJob, member: ReplicaMember, run_folder: Path) -> Engine:
    from plaudit_workers.rollout.engines.vllm_engine import VllmEngine

    return VllmEngine.from_job(job, member, run_folder)


def _scripted(job: RLJob, _: ReplicaMember, __: Path) -> Engine:
    from plaudit_workers.rollout.engines.script import Script
    from plaudit_workers.rollout.engines.scripted import ScriptedEngine

    rollout = job.spec.rollout
    script = Script.from_arguments(rollout.engine.arguments)
    tokenizer = None
    if script.turns:
        from plaudit_workers.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(job.spec.model)
    return ScriptedEngine(script, max_concurrent_samples=rollout.engine.max_concurrent_samples, tokenizer=tokenizer)


ENGINES: dict[str, Callable[[RLJob, ReplicaMember, Path], Engine]] = {"vllm": _vllm, "scripted": _scripted}


def build_engine(job: RLJob, member: ReplicaMember = WHOLE, run_folder: Path = Path()) -> Engine:
    """Build the engine of ``spec.rollout.engine`` for the leader of a replica; it is not started."""
    return ENGINES[job.spec.rollout.engine.kind](job, member, run_folder)


@asynccontextmanager
async def open_agent(job: RLJob) -> AsyncIterator[Agent]:
    """Open the agent of ``spec.rollout.agent``; its processes end with the context.

    Raises:
        RefusedError: its files, tools or chat template cannot be used.
    """
    agent = job.spec.rollout.agent
    if agent.kind == "singleTurn":
        yield SingleTurn()
        return
    processes = AgentProcesses(sources_of(job))
    try:
        await processes.open()
        if agent.kind == "endpoint":
            async with _endpoint(job, processes) as opened:
                yield opened
            return
        if agent.kind == "custom" or processes.environment == "loop":
            yield CustomAgent(processes, agent.timeout_seconds)
        else:
            yield await _conversations(job, processes)
    finally:
        await processes.close()


async def _conversations(job: RLJob, processes: AgentProcesses) -> Agent:
    from plaudit_workers.rollout.engines.vllm_arguments import prepare_environment

    prepare_environment(job.spec.model.source)  # before anything imports torch
    from plaudit_workers.rollout.agents.chat.tool_calls import ToolCallParser
    from plaudit_workers.rollout.agents.environment import EnvironmentAgent
    from plaudit_workers.rollout.agents.tools import ToolAgent, ToolLimits
    from plaudit_workers.tokenizer import ChatTemplate

    spec, tools = job.spec.rollout.agent, await processes.open()
    schemas = [tool.schema for tool in tools]
    template = ChatTemplate.of_model(job.spec.model, schemas)
    parser = ToolCallParser(spec.tool_parser, template.tokenizer, schemas)
    chat = (template, parser, processes, tools, ToolLimits.from_spec(spec))
    agent = (
        ToolAgent(*chat)
        if spec.kind == "tools"
        else EnvironmentAgent(
            *chat, reads_text=processes.environment == "text", step_limit_s=spec.environment_timeout_seconds
        )
    )
    if remark := agent.suffix.check(tools[0].name if tools else ""):
        logger.warning(remark)
    return agent


@asynccontextmanager
async def _endpoint(job: RLJob, processes: AgentProcesses) -> AsyncIterator[Agent]:
    from plaudit_workers.rollout.engines.vllm_arguments import prepare_environment

    prepare_environment(job.spec.model.source)  # before anything imports torch
    from plaudit_workers.rollout.agents.endpoint.agent import EndpointAgent
    from plaudit_workers.rollout.agents.endpoint.chat_format import ChatFormats
    from plaudit_workers.rollout.agents.endpoint.server import EndpointServer
    from plaudit_workers.tokenizer import load_tokenizer

    model, spec = job.spec.model, job.spec.rollout.agent
    chat_formats = ChatFormats(load_tokenizer(model), model.chat_template_arguments, spec.tool_parser)
    if chat_formats.of([]).suffix.rewrites_history():
        logger.warning(REWRITES)
    async with EndpointServer() as server:
        yield EndpointAgent(processes, server, chat_formats, spec.max_turns, spec.timeout_seconds)
