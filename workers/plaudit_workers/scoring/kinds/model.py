"""``kind: model``."""

from __future__ import annotations

from plaudit_reward.model_client.scorer import ModelScorer
from plaudit_reward.scorer import Scorer
from plaudit_workers.job.spec.rewards.scorers import ScorerSpec
from plaudit_workers.scoring.kinds.context import BuildContext
from plaudit_workers.scoring.kinds.endpoint import cached_in_run, trace_header
from plaudit_workers.scoring.kinds.served import server_pool


def model_scorer(scorer: ScorerSpec, context: BuildContext) -> Scorer:
    """Build the client of a reward model's servers in this run."""
    assert scorer.model is not None
    built = ModelScorer(
        server_pool(scorer, context),
        form=scorer.model.input,
        max_concurrent=context.reward.workers.max_concurrent_samples,
        traceparent=trace_header(context),
    )
    return cached_in_run(built, scorer, context)
