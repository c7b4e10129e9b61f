"""``kind: model``."""

from __future__ import annotations

import os

from plaudit_reward.model_client.addresses import TOKEN_VARIABLE
from plaudit_reward.model_client.scorer import ModelScorer
from plaudit_reward.scorer import Scorer
from plaudit_workers.job.spec.rewards.scorers import ScorerSpec
from plaudit_workers.scoring.kinds.context import BuildContext
from plaudit_workers.scoring.kinds.endpoint import cached_in_run, trace_header


def model_scorer(scorer: ScorerSpec, context: BuildContext) -> Scorer:
    """Build the client of a reward model's servers in this run."""
    assert scorer.model is not None
    built = ModelScorer(
        scorer.name,
        context.model_servers.get(scorer.name, ()),
        form=scorer.model.input,
        max_concurrent=context.reward.workers.max_concurrent_samples,
        token=os.environ.get(TOKEN_VARIABLE, ""),
        traceparent=trace_header(context),
    )
    return cached_in_run(built, scorer, context)
