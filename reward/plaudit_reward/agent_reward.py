"""``kind: environment``: return the reward that a sample's tools or environment gave it."""

from __future__ import annotations

from plaudit_reward.score import Score
from plaudit_reward.scorer import Attempt
from plaudit_wire.sample import Sample

_ALWAYS_ROOM = 1_000_000


class AgentRewardScorer:
    """Return the agent's reward; a sample without one is ``skipped``, never zero."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def open(self) -> None:
        """Start nothing."""

    async def score(self, sample: Sample, attempt: Attempt) -> Score:
        """Return the reward that travelled with the sample."""
        reward = sample.agent_reward
        if reward is None:
            return Score.failed("skipped", "neither the tools nor the environment gave a reward")
        if reward.outcome != "scored" or reward.value is None:
            return Score.failed(reward.outcome, reward.reason or "")
        return Score.scored(reward.value)

    def room(self) -> int:
        """Return a large number: it never waits."""
        return _ALWAYS_ROOM

    async def close(self) -> None:
        """Stop nothing."""
