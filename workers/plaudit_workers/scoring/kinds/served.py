"""The servers of a scorer's model, as the reward worker reaches them."""

from __future__ import annotations

import os

from plaudit_reward.served.addresses import TOKEN_VARIABLE
from plaudit_reward.served.pool import ServerPool
from plaudit_workers.job.spec.rewards.scorers import ScorerSpec
from plaudit_workers.scoring.kinds.context import BuildContext


def server_pool(scorer: ScorerSpec, context: BuildContext) -> ServerPool:
    """Build the pool of the servers that the job runs for a scorer."""
    sleeps = scorer.served is not None and scorer.served.sleep_during_updates
    return ServerPool(
        scorer.name,
        context.model_servers.get(scorer.name, ()),
        max_concurrent=context.reward.workers.max_concurrent_samples,
        token=os.environ.get(TOKEN_VARIABLE, ""),
        gate=context.gate if sleeps else None,
    )
