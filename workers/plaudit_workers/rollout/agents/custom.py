"""``agent.kind: custom``: a user's class, loaded from a Python file."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any, cast

from plaudit_workers.process import RefusedError
from plaudit_workers.rollout.agents.agent import Agent


def load_agent(path: Path, class_name: str) -> Agent:
    """Import the file and create one instance of the class, without arguments.

    Args:
        path: a Python file; its folder is not added to ``sys.path``.
        class_name: a class with ``async def run(self, prompt, generate) -> Trajectory``.

    Raises:
        RefusedError: file or class are missing, the import fails, or ``run`` is not a coroutine function.
    """
    agent_class: Any = getattr(_module(path), class_name, None)
    if not inspect.isclass(agent_class):
        raise RefusedError(f"spec.rollout.agent: {path} has no class {class_name!r}")
    if not inspect.iscoroutinefunction(getattr(agent_class, "run", None)):
        raise RefusedError(f"spec.rollout.agent: {class_name} in {path} needs 'async def run(self, prompt, generate)'")
    try:
        return cast(Agent, agent_class())
    except Exception as error:
        raise RefusedError(f"spec.rollout.agent: {class_name}() in {path} raised {error!r}") from error


def _module(path: Path) -> object:
    specification = importlib.util.spec_from_file_location(f"plaudit_agent_{path.stem}", path)
    if specification is None or specification.loader is None or not path.is_file():
        raise RefusedError(f"spec.rollout.agent.path: {path} is not a Python file")
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    try:
        specification.loader.exec_module(module)
    except Exception as error:
        raise RefusedError(f"spec.rollout.agent.path: importing {path} raised {error!r}") from error
    return module
