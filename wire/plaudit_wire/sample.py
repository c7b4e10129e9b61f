"""The input of a scorer: one finished sample. Rollouts write it to the stream ``samples``, reward workers read it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import msgspec


class AgentReward(msgspec.Struct, frozen=True, omit_defaults=True):
    """The reward that an agent's tools or environment gave a sample, or the reason that there is none.

    ``value`` is present exactly when ``outcome`` is ``scored``.
    """

    outcome: Literal["scored", "data_error", "infra_error", "timeout", "skipped"]
    value: float | None = None
    reason: str | None = None


class Sample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One finished response with everything that a scorer may need."""

    group: str
    """Id of the group (the prompt's n samples)."""
    index: int
    """Index among the group's n samples, from 0."""
    data_source: str
    prompt: str
    """The prompt as the model saw it (chat template applied)."""
    response: str
    """The generated text, without special tokens."""
    ground_truth: Any = None
    """``reward_model.ground_truth`` of the data row."""
    extra_info: dict[str, Any] = {}
    """``extra_info`` of the data row."""
    messages: list[dict[str, Any]] = []
    """The prompt's chat messages, where the data holds messages."""
    response_tokens: int = 0
    max_tokens: int = 0
    """The limit on the response's tokens (``sampling.maxTokens``), for length penalties."""
    finish_reason: str = "stop"
    """``stop`` or ``length``."""
    split: Literal["train", "validation"] = "train"
    completion: list[dict[str, Any]] = []
    """The chat messages after the prompt (assistant, tool, user), where an agent held a conversation; ``response`` is
    its text from the first sampled token to the last."""
    tool_rewards: list[float] = []
    """Rewards that tools returned with their results, in the order of the calls."""
    turn_rewards: list[float] = []
    """Rewards that an environment gave for each turn."""
    agent_reward: AgentReward | None = None
    """The reward of the tools or the environment for the whole sample; None: the agent gives no rewards."""
    environment: dict[str, Any] | None = None
    """Public attributes of the environment's instance at the end of the episode, plain data only; None: there is no
    instance, or it gave no answer."""
    failure: AgentReward | None = None
    """The reason that the conversation broke off: no scorer runs, and the sample gets this outcome without a value."""

    @property
    def num_turns(self) -> int | None:
        """Return the number of messages as verl counts them: user, assistant and tool turns; None without an agent."""
        if not self.completion:
            return None
        num_assistant = len([message for message in self.completion if message.get("role") == "assistant"])
        return 1 + num_assistant + _num_answers(self.completion)

    @property
    def answer(self) -> str:
        """Return the text of the policy's last turn; without an agent the whole response."""
        turns = (message for message in reversed(self.completion) if message.get("role") == "assistant")
        last = next(turns, None)
        return self.response if last is None else str(last.get("content") or "")


def _num_answers(completion: list[dict[str, Any]]) -> int:
    """Count runs of consecutive messages that are not the policy's: the results of parallel calls are one turn."""
    roles = ["assistant", *(message.get("role") for message in completion)]
    return sum(before == "assistant" != after for before, after in pairwise(roles))
