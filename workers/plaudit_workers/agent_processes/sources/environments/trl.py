"""Run environments in TRL's form (``environment_factory``): ``reset``, public methods as tools, maybe ``get_reward``.

An instance is created in the sample's process, so it may open connections. To describe its methods, a class is not
instantiated; a factory function is called once in a fork.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from plaudit_reward.functions.signature import named, parameters_of, takes_any
from plaudit_wire.errors import ConfigurationError
from plaudit_wire.messages import Prompt
from plaudit_workers.agent_processes.messages import EnvironmentClass, Tool
from plaudit_workers.agent_processes.sources.environments.attributes import public_attributes
from plaudit_workers.agent_processes.sources.environments.environment import (
    Messages,
    Observation,
    columns_of,
    prompt_messages,
    with_observation,
)
from plaudit_workers.agent_processes.sources.functions import describe, to_answer, to_text
from plaudit_workers.agent_processes.sources.in_fork import in_fork
from plaudit_workers.agent_processes.sources.tool import ToolAnswer
from plaudit_workers.agent_processes.sources.user_code import run_user_code

_NO_TOOLS = ("reset", "get_reward")


class Method:
    """Call a public method of an environment as a tool."""

    def __init__(self, environment: TRLEnvironment, description: Tool) -> None:
        self.description = description
        self._environment = environment

    async def call(self, arguments: dict[str, Any], create_arguments: dict[str, Any]) -> ToolAnswer:
        """Call the method of this sample's instance; the policy reads ``str`` of its result, as in TRL's own loop."""
        result = await run_user_code(getattr(self._environment.instance, self.description.name), **arguments)
        return to_answer(result) if isinstance(result, list) else ToolAnswer(str(result))


class TRLEnvironment:
    """Run an environment of TRL.

    Args:
        factory: the class, or a function that returns an instance.
        schemas: in OpenAI's format.
        gives_reward: True if it has ``get_reward``.
    """

    reads_text = False

    def __init__(
        self, factory: Callable[..., Any], source: EnvironmentClass, schemas: list[dict[str, Any]], gives_reward: bool
    ) -> None:
        self.gives_reward = gives_reward
        self.instance: Any = None
        self._create = lambda: factory(**source.arguments)
        self.tools = [Method(self, Tool(schema["function"]["name"], schema, source.timeout_s)) for schema in schemas]

    @classmethod
    def load(cls, factory: Callable[..., Any], source: EnvironmentClass) -> TRLEnvironment:
        """Describe the environment's methods.

        Raises:
            ConfigurationError: it has no ``reset``, or a method lacks type hints or a docstring.
        """
        if inspect.isclass(factory):
            schemas, gives_reward = _describe(object.__new__(factory), source)
        else:
            schemas, gives_reward = in_fork(lambda: _describe(factory(**source.arguments), source))
        return cls(factory, source, schemas, gives_reward)

    async def reset(self, prompt: Prompt) -> Messages | None:
        """Create an instance and reset it with the data row's columns; append what it returns to the last message."""
        self.instance = await run_user_code(self._create)
        columns, accepted = columns_of(prompt), parameters_of(self.instance.reset)
        if not takes_any(accepted):
            columns = {name: value for name, value in columns.items() if name in named(accepted)}
        observation = await run_user_code(self.instance.reset, **columns)
        return None if observation is None else with_observation(prompt_messages(prompt), to_text(observation))

    async def step(self, action: str) -> Observation:
        """Do nothing: the policy acts through tools."""
        raise NotImplementedError

    async def finish(self, completion: Messages) -> float | None:
        """Return the reward of ``get_reward``."""
        if not self.gives_reward:
            return None
        reward: float | None = await run_user_code(self.instance.get_reward)
        return reward

    async def attributes(self) -> dict[str, Any] | None:
        """Return the instance's public attributes; TRL passes the instance itself to reward functions."""
        attributes: dict[str, Any] = await run_user_code(public_attributes, self.instance)
        return attributes


def _describe(instance: Any, source: EnvironmentClass) -> tuple[list[dict[str, Any]], bool]:
    names = [name for name, _ in inspect.getmembers(type(instance), predicate=inspect.isfunction)]
    if "reset" not in names:
        raise ConfigurationError(f"what {source.class_name} in {source.path} returns has no method reset")
    methods = [name for name in names if not name.startswith("_") and name not in _NO_TOOLS]
    where = f"in {source.path}"
    schemas = [describe(getattr(instance, name), f"{source.class_name}.{name}", where) for name in methods]
    return schemas, "get_reward" in names
