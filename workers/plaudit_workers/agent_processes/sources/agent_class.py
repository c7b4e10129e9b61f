"""Load a user's agent: a class with ``async def run(self, prompt, generate) -> Trajectory``.

It is instantiated once, without arguments, before the processes of samples are forked: each sample works on its own
copy of the instance.
"""

from __future__ import annotations

import inspect
from typing import Any

from plaudit_reward.functions.user_file import import_user_file
from plaudit_wire.errors import ConfigurationError
from plaudit_workers.agent_processes.messages import AgentClass


def load_agent_class(source: AgentClass) -> Any:
    """Import the file and create an instance.

    Raises:
        ConfigurationError: file or class are missing, the import fails, or ``run`` is not a coroutine function.
    """
    found: Any = getattr(import_user_file(source.path, "agent file"), source.class_name, None)
    if not inspect.isclass(found):
        raise ConfigurationError(f"{source.path} has no class {source.class_name!r}")
    if not inspect.iscoroutinefunction(getattr(found, "run", None)):
        raise ConfigurationError(f"{source.class_name} in {source.path} needs 'async def run(self, prompt, generate)'")
    try:
        return found()
    except Exception as error:  # the user's code may raise anything
        raise ConfigurationError(f"{source.class_name}() in {source.path} raised {error!r}") from error
