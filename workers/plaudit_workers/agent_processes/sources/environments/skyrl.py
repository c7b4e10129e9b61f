"""Run environments in SkyRL's form (``BaseTextEnv``): ``init(prompt)``, then ``step(action)`` for each turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plaudit_reward.functions.signature import named, parameters_of, takes_any
from plaudit_wire.messages import Prompt
from plaudit_workers.agent_processes.messages import EnvironmentClass
from plaudit_workers.agent_processes.sources.environments.environment import (
    AttributeDict,
    Messages,
    Observation,
    columns_of,
    prompt_messages,
)
from plaudit_workers.agent_processes.sources.tool import LoadedTool
from plaudit_workers.agent_processes.sources.user_code import run_user_code


class SkyRLEnvironment:
    """Run an environment of SkyRL, created for each sample as ``skyrl_gym.make`` does.

    ``source.arguments`` become ``env_config``.
    """

    reads_text = True
    gives_reward = False

    def __init__(self, factory: Callable[..., Any], source: EnvironmentClass) -> None:
        self.tools: list[LoadedTool] = []
        self._factory = factory
        self._source = source
        self._instance: Any = None

    async def reset(self, prompt: Prompt) -> Messages | None:
        """Create an instance with the data row as ``extras``; return the prompt that ``init`` returns."""
        self._instance = await run_user_code(self._create, prompt)
        given = prompt_messages(prompt)
        returned, _ = await run_user_code(self._instance.init, [dict(message) for message in given])
        return None if returned == given else [dict(message) for message in returned]

    async def step(self, action: str) -> Observation:
        """Take one turn."""
        output: Any = await run_user_code(self._instance.step, action)
        messages = [dict(message) for message in output["observations"]]
        return Observation(messages, output["reward"], bool(output["done"]))

    async def finish(self, completion: Messages) -> float | None:
        """Close the instance; its rewards came with its steps."""
        if hasattr(self._instance, "close"):
            await run_user_code(self._instance.close)
        return None

    async def attributes(self) -> dict[str, Any] | None:
        """Return None: SkyRL passes no instance to reward functions."""
        return None

    def _create(self, prompt: Prompt) -> Any:
        columns = {name: value for name, value in columns_of(prompt).items() if name != "prompt"}
        given: dict[str, Any] = {
            "env_config": AttributeDict(self._source.arguments),
            "extras": {
                "max_turns": self._source.max_turns,
                "reward_spec": {"method": "rule", "ground_truth": prompt.ground_truth},
                **columns,
            },
        }
        accepted = parameters_of(self._factory)
        if not takes_any(accepted):
            given = {name: value for name, value in given.items() if name in named(accepted)}
        return self._factory(**given)
