"""``kind: service``."""

from __future__ import annotations

from plaudit_reward.endpoint.usage import EndpointUsage
from plaudit_reward.remote.client import RemoteClient
from plaudit_reward.remote.remedies import SERVICE
from plaudit_reward.remote.scorer import RemoteScorer
from plaudit_reward.remote.shapes.plaudit import CALLER_HEADER
from plaudit_reward.remote.shapes.registry import SHAPES
from plaudit_reward.scorer import Scorer
from plaudit_wire.errors import RefusedError
from plaudit_workers.job.secrets import secret_value
from plaudit_workers.job.spec.rewards.scorers import ScorerSpec
from plaudit_workers.scoring.kinds.context import BuildContext
from plaudit_workers.scoring.kinds.endpoint import cached, limiter, trace_header, usage_report


def service_scorer(scorer: ScorerSpec, context: BuildContext) -> Scorer:
    """Build the client of a reward service; the run is a caller of its own among those that share a token.

    Raises:
        RefusedError: the service is named, and nothing but an operator knows where it is; or the token has no value.
    """
    assert scorer.service is not None
    service = scorer.service
    field = f"scorer {scorer.name}: service"
    if not service.url:
        raise RefusedError(
            f"{field}.name: {service.name!r} is a name on Kubernetes only. Under plaudit run give url and tokenSecret"
        )
    secret = service.token_secret
    usage = EndpointUsage()
    built = RemoteScorer(
        scorer.name,
        RemoteClient(
            f"{service.url.rstrip('/')}/v1/score",
            SHAPES["plaudit"],
            usage,
            api_key=secret_value(secret, f"{field}.tokenSecret") if secret else "",
            headers={CALLER_HEADER: context.run} if context.run else {},
            max_connections=context.reward.workers.max_concurrent_samples,
            remedies=SERVICE,
        ),
        limiter(scorer, service.url, context),
        usage_report(scorer.name, usage, context),
        trace_header(context),
    )
    return cached(built, scorer, usage, context)
