"""``kind: rule``."""

from __future__ import annotations

from plaudit_reward.rules.scorer import RuleScorer
from plaudit_workers.job.spec.rewards.scorers import ScorerSpec
from plaudit_workers.scoring.kinds.context import BuildContext


def rule_scorer(scorer: ScorerSpec, context: BuildContext) -> RuleScorer:
    """Make the scorer of a built-in rule."""
    processes = context.reward.workers.processes
    return RuleScorer(scorer.name, scorer.rule, scorer.rule_arguments, processes=processes)
