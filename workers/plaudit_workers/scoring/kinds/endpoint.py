"""The parts that scorers of an endpoint share: limits over all workers, the report of usage, the trace header."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from plaudit_reward.endpoint.cached_scorer import CachedScorer
from plaudit_reward.endpoint.limiter import Limiter
from plaudit_reward.endpoint.limits import Budget, RateLimits
from plaudit_reward.endpoint.local_budget import LocalBudget
from plaudit_reward.endpoint.redis_budget import RedisBudget
from plaudit_reward.endpoint.score_cache import ScoreCache, sample_key
from plaudit_reward.endpoint.usage import EndpointUsage, UsageReport
from plaudit_reward.scorer import Scorer
from plaudit_wire.logs import get_logger
from plaudit_wire.names import Names
from plaudit_wire.sample import Sample
from plaudit_wire.trace_context import drawn, traceparent
from plaudit_workers.job.secrets import secret_value
from plaudit_workers.job.spec.rewards.scorers import ScorerSpec
from plaudit_workers.scoring.kinds.context import BuildContext
from plaudit_workers.scoring.version import scorer_version
from plaudit_workers.stream.connection import RedisAddress

logger = get_logger(__name__)

_TIMEOUT_S = 5.0
_RETRIES = 3


def limiter(scorer: ScorerSpec, endpoint: str, context: BuildContext) -> Limiter:
    """Build the queue in front of an endpoint.

    Args:
        endpoint: names the endpoint; scorers of a run with the same one share a budget.
    """
    return Limiter(_budget(scorer, endpoint, context), scorer.name)


def usage_report(name: str, usage: EndpointUsage, context: BuildContext) -> UsageReport | None:
    """Build the report of an endpoint's usage to the run; None outside of a run."""
    if context.redis is None:
        return None
    return UsageReport(name, usage, context.redis.client(timeout_s=_TIMEOUT_S, retries=0), context.run)


def cached(built: Scorer, scorer: ScorerSpec, usage: EndpointUsage, context: BuildContext) -> Scorer:
    """Put the cache of a scorer of an endpoint in front of it, if it has one; outside of a run nothing is kept."""
    cache = _cache(scorer, context, scorer_version(scorer))
    return built if cache is None else CachedScorer(built, cache, usage)


def cached_in_run(
    built: Scorer, scorer: ScorerSpec, context: BuildContext, key: Callable[[Sample], bytes | None] = sample_key
) -> Scorer:
    """Put the cache of a scorer that runs in the job in front of it, if it has one.

    Its scores depend on files and images that the scorer's section does not show, so each version of the whole scoring
    has entries of its own.
    """
    cache = _cache(scorer, context, f"{scorer_version(scorer)}:{context.version}")
    if cache is None:
        return built
    usage = EndpointUsage()
    return CachedScorer(built, cache, usage, usage_report(scorer.name, usage, context), key)


def _cache(scorer: ScorerSpec, context: BuildContext, version: str) -> ScoreCache | None:
    if scorer.cache is None or context.redis is None:
        return None
    client = context.redis.client(timeout_s=_TIMEOUT_S, retries=0)
    prefix = f"{Names(context.run).prefix}cache:{version}"
    return ScoreCache(client, prefix, scorer.cache.lifetime_seconds, scorer.cache.entries)


def trace_header(context: BuildContext) -> Callable[[Sample], str] | None:
    """Return the function that gives a sample's ``traceparent``; None where nothing is traced."""
    run, share = context.run, context.traced_share
    if share is None:
        return None
    return lambda sample: traceparent(
        run, sample.group, sample.index, sampled=drawn(run, sample.group, sample.index, share)
    )


def _budget(scorer: ScorerSpec, endpoint: str, context: BuildContext) -> Budget:
    if scorer.limits is None:
        return LocalBudget(RateLimits())
    given = scorer.limits
    limits = RateLimits(given.requests_per_minute, given.tokens_per_minute, given.concurrency)
    if given.shared is not None:
        secret = given.shared.password_secret
        password = secret_value(secret, f"scorer {scorer.name}: limits.shared.passwordSecret") if secret else ""
        address, key = RedisAddress(given.shared.url, password), f"plaudit:limits:{{{given.shared.key}}}"
    elif context.redis is not None:
        digest = hashlib.sha256(endpoint.encode()).hexdigest()[:16]
        address, key = context.redis, f"plaudit:{{{context.run}}}:limits:{digest}"
    else:
        logger.warning("limits apply to this process only", scorer=scorer.name)
        return LocalBudget(limits)
    return RedisBudget(address.client(timeout_s=_TIMEOUT_S, retries=_RETRIES), key, context.worker, limits)
