"""``kind: environment``."""

from __future__ import annotations

from plaudit_reward.agent_reward import AgentRewardScorer
from plaudit_workers.job.spec.rewards.scorers import ScorerSpec
from plaudit_workers.scoring.kinds.context import BuildContext


def environment_scorer(scorer: ScorerSpec, context: BuildContext) -> AgentRewardScorer:
    """Make the scorer of rewards that tools and environments gave."""
    return AgentRewardScorer(scorer.name)
