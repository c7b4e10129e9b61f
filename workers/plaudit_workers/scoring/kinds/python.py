"""``kind: python``, and the job's own combining function."""

from __future__ import annotations

from plaudit_reward.endpoint.score_cache import whole_sample_key
from plaudit_reward.functions.target import Target
from plaudit_reward.isolation.function_scorer import FunctionScorer, Router
from plaudit_reward.served.local_router import LocalRouter
from plaudit_workers.job.function_target import function_target
from plaudit_workers.job.spec.rewards.scorers import ScorerSpec
from plaudit_workers.scoring.kinds.context import AnyScorer, BuildContext
from plaudit_workers.scoring.kinds.endpoint import cached_in_run, trace_header
from plaudit_workers.scoring.kinds.served import server_pool


def python_scorer(scorer: ScorerSpec, context: BuildContext) -> AnyScorer:
    """Make the scorer of a user's function or class."""
    assert scorer.python is not None
    target = function_target(scorer, scorer.python)
    router = None
    if scorer.python.serve is not None:
        limit_s = scorer.timeout_seconds or context.reward.timeout_seconds
        router = LocalRouter(server_pool(scorer, context), limit_s)
    built = function_scorer(scorer.name, target, context, router)
    return cached_in_run(built, scorer, context, whole_sample_key) if scorer.scope == "sample" else built


def function_scorer(name: str, target: Target, context: BuildContext, router: Router | None = None) -> FunctionScorer:
    """Make a function scorer with the job's number of child processes."""
    workers = context.reward.workers
    return FunctionScorer(
        name,
        target,
        processes=workers.processes,
        max_concurrent=workers.max_concurrent_samples,
        traceparent=trace_header(context),
        router=router,
    )
