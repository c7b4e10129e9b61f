"""Define the protocol of environments, and answer the rollout's questions. Runs in the processes of samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from plaudit_wire.errors import DataError
from plaudit_wire.messages import Prompt
from plaudit_workers.agent_processes.messages import AskEnvironment, EnvironmentReply
from plaudit_workers.agent_processes.sources.tool import LoadedTool

Messages = list[dict[str, Any]]


class Observation(NamedTuple):
    """Hold what the environment shows after a step."""

    messages: Messages
    reward: float | None = None
    done: bool = False


class Environment(Protocol):
    """Run the environment of one sample: created before the fork, reset in the sample's process."""

    @property
    def tools(self) -> Sequence[LoadedTool]:
        """Return the actions that the policy takes by tool calls."""
        ...

    @property
    def reads_text(self) -> bool:
        """Return True where each turn of the policy is an action (``step``)."""
        ...

    @property
    def gives_reward(self) -> bool:
        """Return True where ``finish`` returns a reward."""
        ...

    async def reset(self, prompt: Prompt) -> Messages | None:
        """Begin an episode; return the prompt's messages if they change."""
        ...

    async def step(self, action: str) -> Observation:
        """Take the policy's turn; called only if ``reads_text``."""
        ...

    async def finish(self, completion: Messages) -> float | None:
        """End the episode; return its reward, None for no reward."""
        ...

    async def attributes(self) -> dict[str, Any] | None:
        """Return what reward functions may read of the instance after ``finish``; None without an instance."""
        ...


async def answer(environment: Environment, question: AskEnvironment) -> EnvironmentReply:
    """Answer one question of the rollout.

    Raises:
        DataError: the reward is not a finite number.
        InfrastructureError: the environment's server is broken or unreachable.
    """
    if question.method == "reset":
        assert question.prompt is not None
        return EnvironmentReply(question.id, messages=await environment.reset(question.prompt))
    if question.method == "step":
        observation = await environment.step(question.action)
        reward = _number(observation.reward)
        return EnvironmentReply(question.id, messages=observation.messages, reward=reward, done=observation.done)
    reward = _number(await environment.finish(question.completion))
    if reward is None and environment.gives_reward:
        return EnvironmentReply(question.id, "skipped", "the environment gave no reward")
    return EnvironmentReply(question.id, reward=reward)


def prompt_messages(prompt: Prompt) -> Messages:
    """Return the prompt as chat messages; a data row that holds text becomes a user's message."""
    return [dict(message) for message in prompt.messages] or [{"role": "user", "content": prompt.prompt}]


def with_observation(messages: Messages, text: str) -> Messages:
    """Append an environment's first observation to the last message, as TRL does."""
    *before, last = messages
    return [*before, {**last, "content": f"{last.get('content') or ''}{text}"}]


def columns_of(prompt: Prompt) -> dict[str, Any]:
    """Return the data row as the trainers pass it: keys of ``extra_info`` are columns of their own."""
    return {
        "solution": prompt.ground_truth,
        "answer": prompt.ground_truth,
        **prompt.extra_info,
        "prompt": prompt_messages(prompt),
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "extra_info": prompt.extra_info,
    }


class AttributeDict(dict[str, Any]):
    """Hold a dictionary whose keys are attributes too, as users' files read OmegaConf's; a missing key is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self.get(name)
        return AttributeDict(value) if type(value) is dict else value


def _number(value: Any) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"the reward {value!r} is not a finite number")
    return number
