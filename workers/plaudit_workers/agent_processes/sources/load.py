"""Load all sources of a job's agent. Runs in the template process only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from plaudit_wire.errors import ConfigurationError
from plaudit_workers.agent_processes.messages import (
    AgentClass,
    EnvironmentClass,
    EnvironmentKind,
    EnvironmentServer,
    FunctionTool,
    Program,
    Source,
    Tool,
    VerlTools,
)
from plaudit_workers.agent_processes.sources.agent_class import load_agent_class
from plaudit_workers.agent_processes.sources.environments.environment import Environment
from plaudit_workers.agent_processes.sources.environments.load import load_class, load_server
from plaudit_workers.agent_processes.sources.environments.verl_loop import VerlAgentLoop
from plaudit_workers.agent_processes.sources.functions import load_function
from plaudit_workers.agent_processes.sources.mcp_server import load_mcp_tools
from plaudit_workers.agent_processes.sources.program import RunnableProgram, load_program
from plaudit_workers.agent_processes.sources.tool import LoadedTool
from plaudit_workers.agent_processes.sources.verl_tools import load_verl_tools


@dataclass
class LoadedSources:
    """Hold everything that the processes of samples run."""

    tools: dict[str, LoadedTool] = field(default_factory=dict)
    agent: Any = None
    """The instance of the agent's class."""
    program: RunnableProgram | None = None
    environment: Environment | None = None

    @property
    def descriptions(self) -> list[Tool]:
        """Return the tools as the model sees them."""
        return [tool.description for tool in self.tools.values()]

    @property
    def environment_kind(self) -> EnvironmentKind:
        """Return how the policy acts in the environment."""
        if self.environment is not None:
            return "text" if self.environment.reads_text else "calls"
        return "loop" if self.agent is not None else ""


def load(sources: Sequence[Source]) -> LoadedSources:
    """Load the sources.

    Raises:
        ConfigurationError: one cannot be used, or two tools have the same name.
    """
    loaded = LoadedSources()
    for source in sources:
        if isinstance(source, AgentClass):
            loaded.agent = load_agent_class(source)
            continue
        if isinstance(source, Program):
            loaded.program = load_program(source)
            continue
        for tool in _tools(source, loaded):
            name = tool.description.name
            if name in loaded.tools:
                raise ConfigurationError(f"two tools have the name {name!r}: rename one of them")
            loaded.tools[name] = tool
    return loaded


def _tools(source: Source, loaded: LoadedSources) -> Sequence[LoadedTool]:
    if isinstance(source, EnvironmentClass | EnvironmentServer):
        environment = load_class(source) if isinstance(source, EnvironmentClass) else load_server(source)
        if isinstance(environment, VerlAgentLoop):
            loaded.agent = environment
            return []
        loaded.environment = environment
        return environment.tools
    if isinstance(source, FunctionTool):
        return [load_function(source)]
    if isinstance(source, VerlTools):
        return load_verl_tools(source)
    assert not isinstance(source, AgentClass | Program)
    return load_mcp_tools(source)
