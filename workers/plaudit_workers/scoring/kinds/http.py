"""``kind: http``."""

from __future__ import annotations

from plaudit_reward.endpoint.usage import EndpointUsage
from plaudit_reward.remote.client import RemoteClient
from plaudit_reward.remote.scorer import RemoteScorer
from plaudit_reward.remote.shapes.registry import SHAPES
from plaudit_reward.scorer import Scorer
from plaudit_workers.job.secrets import secret_value
from plaudit_workers.job.spec.rewards.scorers import ScorerSpec
from plaudit_workers.scoring.kinds.context import BuildContext
from plaudit_workers.scoring.kinds.endpoint import cached, limiter, trace_header, usage_report


def http_scorer(scorer: ScorerSpec, context: BuildContext) -> Scorer:
    """Build the client of somebody else's reward endpoint, with the limits that all workers share."""
    assert scorer.http is not None
    http = scorer.http
    secret = http.api_key_secret
    usage = EndpointUsage()
    built = RemoteScorer(
        scorer.name,
        RemoteClient(
            http.url,
            SHAPES[http.shape],
            usage,
            api_key=secret_value(secret, f"scorer {scorer.name}: http.apiKeySecret") if secret else "",
            arguments=http.arguments,
            path=http.json_path,
            max_connections=context.reward.workers.max_concurrent_samples,
        ),
        limiter(scorer, http.url, context),
        usage_report(scorer.name, usage, context),
        trace_header(context),
    )
    return cached(built, scorer, usage, context)
