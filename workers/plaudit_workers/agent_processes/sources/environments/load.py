"""Recognise the form of an environment: of a class by its methods, of a server by its routes."""

from __future__ import annotations

import inspect
from typing import Any

from plaudit_reward.functions.user_file import import_user_file
from plaudit_wire.errors import ConfigurationError
from plaudit_workers.agent_processes.messages import EnvironmentClass, EnvironmentServer
from plaudit_workers.agent_processes.sources.environments.environment import Environment
from plaudit_workers.agent_processes.sources.environments.skyrl import SkyRLEnvironment
from plaudit_workers.agent_processes.sources.environments.trl import TRLEnvironment
from plaudit_workers.agent_processes.sources.environments.verl_loop import VerlAgentLoop


def load_class(source: EnvironmentClass) -> Environment | VerlAgentLoop:
    """Import the file and wrap the class in the form of TRL, SkyRL or verl.

    Raises:
        ConfigurationError: the file cannot be imported, or the class has none of these forms.
    """
    module = import_user_file(source.path, "environment file")
    found: Any = getattr(module, source.class_name, None)
    if not callable(found):
        raise ConfigurationError(f"{source.path} has no class {source.class_name!r}")
    if _has(found, "init", "step"):
        return SkyRLEnvironment(found, source)
    if _is_agent_loop(found):
        return VerlAgentLoop(found, source)
    if _has(found, "reset") or not inspect.isclass(found):
        return TRLEnvironment.load(found, source)
    raise ConfigurationError(
        f"{source.class_name} in {source.path} is no environment: it needs reset (TRL), init and step (SkyRL), or "
        "async def run(self, sampling_params, **kwargs) (verl's AgentLoopBase)"
    )


def load_server(source: EnvironmentServer) -> Environment:
    """Ask a server for its routes and actions.

    Raises:
        ConfigurationError: it cannot be reached, is neither an OpenEnv server nor a resources server of NeMo Gym, or
            is one of several resources servers among which a session would be lost.
    """
    # They need aiohttp, which most agents do without: its import is a third of the template's start.
    from plaudit_workers.agent_processes.sources.environments.nemo_gym import ResourcesServer
    from plaudit_workers.agent_processes.sources.environments.openenv import OpenEnvServer
    from plaudit_workers.agent_processes.sources.environments.server import routes_of

    routes = routes_of(source)
    if {"/seed_session", "/verify"} <= routes.paths:
        if source.spread:
            raise ConfigurationError(
                f"{source.spread}: a resources server of NeMo Gym keeps its sessions in one process, and "
                "their requests would reach others. Set sessionAffinity: clientIP of this environment, or replicas: 1"
            )
        return ResourcesServer(source, routes)
    if "/schema" in routes.paths:
        return OpenEnvServer(source, routes)
    raise ConfigurationError(
        f"the server at {source.url} is no environment: an OpenEnv server has the route /schema, a resources server of "
        f"NeMo Gym /seed_session and /verify; this one has {', '.join(sorted(routes.paths)[:20])}"
    )


def _has(found: Any, *names: str) -> bool:
    return all(callable(getattr(found, name, None)) for name in names)


def _is_agent_loop(found: Any) -> bool:
    bases = {base.__name__ for base in getattr(found, "__mro__", ())}
    run = getattr(found, "run", None)
    return "AgentLoopBase" in bases or (run is not None and "sampling_params" in inspect.signature(run).parameters)
