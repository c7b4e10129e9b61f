"""Load all sources of a job's agent, in the template process only.

Files are imported and classes instantiated once, before the processes of samples are forked: each sample works on its
own copy of an instance. An environment's form is recognised: a class's by its methods, a server's by its routes.
"""

from __future__ import annotations

import importlib
import inspect
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from plaudit_reward.functions.function import import_user_file
from plaudit_wire.errors import ConfigurationError
from plaudit_wire.plain import plain
from plaudit_workers.agents.environment import Environment, SkyRLEnvironment, TRLEnvironment
from plaudit_workers.agents.functions import (
    LoadedTool,
    ToolAnswer,
    attribute_of,
    finite,
    load_function,
    plain_schema,
    run_user_code,
    to_text,
)
from plaudit_workers.agents.mcp_server import load_mcp_tools
from plaudit_workers.agents.messages import (
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
from plaudit_workers.agents.verl_loop import VerlAgentLoop


@dataclass
class LoadedSources:
    """Hold everything that the processes of samples run."""

    tools: dict[str, LoadedTool] = field(default_factory=dict)
    agent: Any = None
    """The instance of the agent's class."""
    program: RunnableProgram | None = None
    environment: Environment | None = None

    @property
    def environment_kind(self) -> EnvironmentKind:
        """Return how the policy acts in the environment."""
        if self.environment is not None:
            return "text" if self.environment.reads_text else "calls"
        return "loop" if self.agent is not None else ""


def load(sources: Sequence[Source]) -> LoadedSources:
    """Load the sources; raise ``ConfigurationError`` if one cannot be used, or two tools have the same name."""
    loaded = LoadedSources()
    for source in sources:
        if isinstance(source, AgentClass):
            loaded.agent = _load_agent_class(source)
            continue
        if isinstance(source, Program):
            loaded.program = _load_program(source)
            continue
        for tool in _tools(source, loaded):
            name = tool.description.name
            if name in loaded.tools:
                raise ConfigurationError(f"two tools have the name {name!r}: rename one of them")
            loaded.tools[name] = tool
    return loaded


def _tools(source: Source, loaded: LoadedSources) -> Sequence[LoadedTool]:
    if isinstance(source, EnvironmentClass | EnvironmentServer):
        environment = _load_class(source) if isinstance(source, EnvironmentClass) else _load_server(source)
        if isinstance(environment, VerlAgentLoop):
            loaded.agent = environment
            return []
        loaded.environment = environment
        return environment.tools
    if isinstance(source, FunctionTool):
        return [load_function(source)]
    if isinstance(source, VerlTools):
        return _load_verl_tools(source)
    assert not isinstance(source, AgentClass | Program)
    return load_mcp_tools(source)


def _load_agent_class(source: AgentClass) -> Any:
    """Import a class with ``async def run(self, prompt, generate) -> Trajectory``; instantiate it without arguments."""
    found: Any = getattr(import_user_file(source.path, "agent file"), source.class_name, None)
    if not inspect.isclass(found):
        raise ConfigurationError(f"{source.path} has no class {source.class_name!r}")
    if not inspect.iscoroutinefunction(getattr(found, "run", None)):
        raise ConfigurationError(f"{source.class_name} in {source.path} needs 'async def run(self, prompt, generate)'")
    try:
        return found()
    except Exception as error:  # the user's code may raise anything
        raise ConfigurationError(f"{source.class_name}() in {source.path} raised {error!r}") from error


@dataclass(frozen=True)
class RunnableProgram:
    """Hold what talks to the policy over HTTP: a function that takes the prompt, or a command."""

    function: Callable[[dict[str, Any]], Any] | None = None
    """It may return a reward."""
    command: list[str] = field(default_factory=list)
    """Started anew for each sample."""


def _load_program(source: Program) -> RunnableProgram:
    """Import the function, or find the command."""
    if source.function:
        function = attribute_of(import_user_file(source.path, "agent file"), source.function)
        if not callable(function):
            raise ConfigurationError(f"{source.path} has no function {source.function!r}")
        return RunnableProgram(function)
    command = [*(source.command or [sys.executable]), *([os.path.abspath(source.path)] if source.path else [])]
    if shutil.which(command[0]) is None:
        raise ConfigurationError(
            f"command: there is no program {command[0]!r}; give a name on PATH or an absolute path"
        )
    return RunnableProgram(command=command)


def _load_verl_tools(source: VerlTools) -> list[LoadedTool]:
    """Instantiate the tool classes that a YAML file in verl's format lists."""
    folder = str(Path(source.path).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # a class may be in a file beside the YAML file
    try:
        content = plain(YAML(typ="safe").load(Path(source.path).read_text(encoding="utf-8")))
        entries = list(content["tools"])
    except (OSError, YAMLError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{source.path} is not a tool configuration in verl's format (tools: [{{class_name: …, config: …, "
            f"tool_schema: …}}]): {type(error).__name__}: {error}"
        ) from error
    return [_load_verl_tool(entry, source) for entry in entries]


def _load_verl_tool(entry: dict[str, Any], source: VerlTools) -> LoadedTool:
    module, _, name = str(entry.get("class_name", "")).rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
        written = entry.get("tool_schema")
        instance = found(config=entry.get("config") or {}, tool_schema=_verl_schema(written) if written else None)
        return _verl_tool(instance, Tool.of(written or plain_schema(instance.tool_schema), source.timeout_s))
    except Exception as error:  # the user's code may raise anything
        raise ConfigurationError(
            f"{source.path}: tool {entry.get('class_name')!r} cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def _verl_tool(instance: Any, description: Tool) -> LoadedTool:
    """Return a tool that calls ``create`` → ``execute`` → ``release``, async or plain, as verl's agent loop does."""

    async def call(arguments: dict[str, Any], create_arguments: dict[str, Any]) -> ToolAnswer:
        created = await run_user_code(instance.create, create_kwargs=create_arguments)
        instance_id = created[0] if isinstance(created, tuple) else created
        try:
            response, reward, _ = await run_user_code(instance.execute, instance_id, arguments)
        finally:
            await run_user_code(instance.release, instance_id)
        # verl's tools return 0.0 where they have no reward to give.
        return ToolAnswer(to_text(response), finite(reward) if reward else None)

    return LoadedTool(description, call)


def _verl_schema(schema: dict[str, Any]) -> Any:
    """Return the schema as verl passes it to the class; the plain dictionary where verl is not installed."""
    try:
        from verl.tools.schemas import OpenAIFunctionToolSchema
    except ImportError:
        return schema
    return OpenAIFunctionToolSchema.model_validate(schema)


def _load_class(source: EnvironmentClass) -> Environment | VerlAgentLoop:
    """Import the file and wrap the class in the form of TRL, SkyRL or verl."""
    module = import_user_file(source.path, "environment file")
    found: Any = getattr(module, source.class_name, None)
    if not callable(found):
        raise ConfigurationError(f"{source.path} has no class {source.class_name!r}")
    if _has(found, "init", "step"):
        return SkyRLEnvironment(found, source)
    if _is_agent_loop(found):
        if source.sandbox:
            raise ConfigurationError(
                f"sandbox is true, and {source.class_name} in {source.path} is an agent loop of verl, which gets no "
                "machine: remove sandbox: true"
            )
        return VerlAgentLoop(found, source)
    if _has(found, "reset") or not inspect.isclass(found):
        return TRLEnvironment(found, source)
    raise ConfigurationError(
        f"{source.class_name} in {source.path} is no environment: it needs reset (TRL), init and step (SkyRL), or "
        "async def run(self, sampling_params, **kwargs) (verl's AgentLoopBase)"
    )


def _load_server(source: EnvironmentServer) -> Environment:
    """Ask a server for its routes and actions."""
    # They need aiohttp, which most agents do without: its import is a third of the template's start.
    from plaudit_reward.endpoint.shapes import OPEN_REWARD_ROUTE
    from plaudit_workers.agents.environment_servers import OpenEnvServer, ResourcesServer, routes_of
    from plaudit_workers.agents.open_reward import OpenRewardServer

    routes = routes_of(source)
    if {"/seed_session", "/verify"} <= routes.paths:
        _refuse_spread(source, "a resources server of NeMo Gym")
        return ResourcesServer(source, routes)
    if "/schema" in routes.paths:  # first, because OpenEnv lists its tasks by the routes of the Open Reward Standard
        return OpenEnvServer(source, routes)
    if OPEN_REWARD_ROUTE in routes.paths:
        _refuse_spread(source, "a server of the Open Reward Standard")
        return OpenRewardServer(source)
    raise ConfigurationError(
        f"the server at {source.url} is no environment: an OpenEnv server has the route /schema, a resources server of "
        f"NeMo Gym /seed_session and /verify, one of the Open Reward Standard {OPEN_REWARD_ROUTE}; this one has "
        f"{', '.join(sorted(routes.paths)[:20])}"
    )


def _refuse_spread(source: EnvironmentServer, kind: str) -> None:
    if source.spread:
        raise ConfigurationError(
            f"{source.spread}: {kind} keeps its sessions in one process, and their requests would reach others. "
            "Set sessionAffinity: clientIP of this environment, or replicas: 1"
        )


def _has(found: Any, *names: str) -> bool:
    return all(callable(getattr(found, name, None)) for name in names)


def _is_agent_loop(found: Any) -> bool:
    bases = {base.__name__ for base in getattr(found, "__mro__", ())}
    run = getattr(found, "run", None)
    return "AgentLoopBase" in bases or (run is not None and "sampling_params" in inspect.signature(run).parameters)
