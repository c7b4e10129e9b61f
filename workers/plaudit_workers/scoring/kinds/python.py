"""``kind: python``, and the job's own combining function."""

from __future__ import annotations

from plaudit_reward.endpoint.score_cache import whole_sample_key
from plaudit_reward.functions.target import Target
from plaudit_reward.isolation.function_scorer import FunctionScorer
from plaudit_workers.job.spec.rewards.scorers import ScorerSpec
from plaudit_workers.scoring.kinds.context import AnyScorer, BuildContext
from plaudit_workers.scoring.kinds.endpoint import cached_in_run, trace_header


def python_scorer(scorer: ScorerSpec, context: BuildContext) -> AnyScorer:
    """Make the scorer of a user's function or class."""
    assert scorer.python is not None
    target = Target(
        path=scorer.python.path,
        function=scorer.python.function,
        arguments=dict(scorer.python.arguments),
        scope=scorer.scope,
        isolation=scorer.isolation,
    )
    built = function_scorer(scorer.name, target, context)
    return cached_in_run(built, scorer, context, whole_sample_key) if scorer.scope == "sample" else built


def function_scorer(name: str, target: Target, context: BuildContext) -> FunctionScorer:
    """Make a function scorer with the job's number of child processes."""
    workers = context.reward.workers
    return FunctionScorer(
        name,
        target,
        processes=workers.processes,
        max_concurrent=workers.max_concurrent_samples,
        traceparent=trace_header(context),
    )
