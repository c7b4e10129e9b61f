"""Decide if a job's groups are scored after their samples. The trainer admits groups accordingly."""

from __future__ import annotations

from plaudit_reward.functions.function import declares_post_process
from plaudit_workers.job.spec.rewards.reward import RewardSpec


def has_group_scorers(reward: RewardSpec) -> bool:
    """Return True if a scorer has group scope or ``post_process_scores``, or values are normalised by group.

    The files are read, not run.
    """
    return reward.combine.normalize == "group" or any(
        scorer.scope == "group"
        or (scorer.python is not None and declares_post_process(scorer.python.path, scorer.python.function))
        for scorer in reward.scorers
    )
