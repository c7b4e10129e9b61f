"""Read the sources of a job's agent, and describe its tools to the model."""

from __future__ import annotations

import os
import re
from typing import Any

from plaudit_wire.errors import RefusedError
from plaudit_workers.agent_processes.messages import (
    AgentClass,
    EnvironmentClass,
    EnvironmentServer,
    FunctionTool,
    McpServer,
    Program,
    Source,
    VerlTools,
)
from plaudit_workers.agent_processes.processes import AgentProcesses
from plaudit_workers.environment_urls import environment_url
from plaudit_workers.job.spec.rljob import RLJob
from plaudit_workers.job.spec.rollout import ToolSpec

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def sources_of(job: RLJob) -> list[Source]:
    """Return what the processes of the job's agent load; nothing for ``singleTurn``."""
    agent = job.spec.rollout.agent
    if agent.kind == "custom":
        return [AgentClass(agent.path, agent.class_name)]
    if agent.kind == "endpoint":
        return [Program(list(agent.command), agent.path, agent.function)]
    tools = [_tool_source(tool) for tool in agent.tools]
    if agent.kind == "environment":
        return [_environment_source(job), *tools]
    return tools if agent.kind == "tools" else []


async def described_tools(job: RLJob) -> list[dict[str, Any]]:
    """Return the tools that prompts list for the model, in OpenAI's format; empty for agents without tools.

    Raises:
        RefusedError: a tool cannot be loaded.
    """
    if job.spec.rollout.agent.kind not in ("tools", "environment"):
        return []
    processes = AgentProcesses(sources_of(job))
    try:
        return [tool.schema for tool in await processes.open()]
    finally:
        await processes.close()


def _environment_source(job: RLJob) -> Source:
    agent = job.spec.rollout.agent
    limit_s = agent.environment_timeout_seconds
    if url := environment_url(agent.environment) if agent.environment else agent.url:
        return EnvironmentServer(url, agent.arguments, limit_s, _spread_server(job, agent.environment))
    model = job.spec.model.model_dump(mode="json")
    return EnvironmentClass(agent.path, agent.class_name, agent.arguments, agent.max_turns, limit_s, model)


def _spread_server(job: RLJob, name: str) -> str:
    """Return the field that spreads an environment's connections over servers; empty if one server has them all."""
    for number, server in enumerate(job.spec.environments):
        if server.name == name and server.replicas > 1 and server.session_affinity == "none":
            return f"spec.environments[{number}].replicas: {server.replicas}"
    return ""


def _tool_source(tool: ToolSpec) -> Source:
    if tool.mcp is not None:
        headers = {name: _filled(name, value) for name, value in tool.mcp.headers.items()}
        return McpServer(tool.mcp.url, list(tool.mcp.command), tool.timeout_seconds, headers)
    if tool.config:
        return VerlTools(tool.config, tool.timeout_seconds)
    return FunctionTool(tool.path, tool.function, tool.timeout_seconds)


def _filled(header: str, value: str) -> str:
    """Replace ``${NAME}`` by the environment variable.

    Raises:
        RefusedError: it is not set.
    """

    def variable(found: re.Match[str]) -> str:
        if (content := os.environ.get(found[1])) is None:
            raise RefusedError(
                f"spec.rollout.agent.tools: mcp.headers.{header} needs the environment variable {found[1]}, which is "
                "not set. Set it for rollouts and trainer (on Kubernetes from a Secret, in their pod's env)"
            )
        return content

    return _VARIABLE.sub(variable, value)
