"""Load all sources of a job's agent. Runs in the template process only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from plaudit_reward.errors import ConfigurationError
from plaudit_workers.agent_processes.messages import AgentClass, FunctionTool, Program, Source, Tool, VerlTools
from plaudit_workers.agent_processes.sources.agent_class import load_agent_class
from plaudit_workers.agent_processes.sources.functions import load_function
from plaudit_workers.agent_processes.sources.mcp_server import load_mcp_tools
from plaudit_workers.agent_processes.sources.program import RunnableProgram, load_program
from plaudit_workers.agent_processes.sources.tool import LoadedTool
from plaudit_workers.agent_processes.sources.verl_tools import load_verl_tools


@dataclass
class LoadedSources:
    """Everything that the processes of samples run."""

    tools: dict[str, LoadedTool] = field(default_factory=dict)
    agent: Any = None
    """The instance of the agent's class."""
    program: RunnableProgram | None = None

    @property
    def descriptions(self) -> list[Tool]:
        """Return the tools as the model sees them."""
        return [tool.description for tool in self.tools.values()]


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
        for tool in _tools(source):
            name = tool.description.name
            if name in loaded.tools:
                raise ConfigurationError(f"two tools have the name {name!r}: rename one of them")
            loaded.tools[name] = tool
    return loaded


def _tools(source: Source) -> Sequence[LoadedTool]:
    if isinstance(source, FunctionTool):
        return [load_function(source)]
    if isinstance(source, VerlTools):
        return load_verl_tools(source)
    assert not isinstance(source, AgentClass | Program)
    return load_mcp_tools(source)
