"""``kind: judge``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from plaudit_reward.endpoint.limiter import Limiter
from plaudit_reward.endpoint.limits import Budget, RateLimits
from plaudit_reward.endpoint.local_budget import LocalBudget
from plaudit_reward.endpoint.redis_budget import RedisBudget
from plaudit_reward.endpoint.usage import EndpointUsage, UsageReport
from plaudit_reward.functions.target import Target
from plaudit_reward.isolation.function_scorer import FunctionScorer
from plaudit_reward.judge.client import JudgeClient
from plaudit_reward.judge.estimate import TokenEstimate
from plaudit_reward.judge.parse import FunctionParser, JsonParser, Parser, RegexParser
from plaudit_reward.judge.prompt import PromptTemplate
from plaudit_reward.judge.scorer import JudgeScorer
from plaudit_wire.logs import get_logger
from plaudit_wire.sample import Sample
from plaudit_wire.trace_context import drawn, traceparent
from plaudit_workers.job.secrets import secret_value
from plaudit_workers.job.spec.scorers import JudgeSpec, ScorerSpec
from plaudit_workers.scoring.kinds.context import BuildContext
from plaudit_workers.stream.connection import RedisAddress

logger = get_logger(__name__)

_TIMEOUT_S = 5.0
_RETRIES = 3


def judge_scorer(scorer: ScorerSpec, context: BuildContext) -> JudgeScorer:
    """Build a judge: an endpoint and the limits that all workers share."""
    assert scorer.judge is not None
    judge = scorer.judge
    group = scorer.scope == "group"
    secret = judge.api_key_secret
    usage = EndpointUsage()
    return JudgeScorer(
        scorer.name,
        PromptTemplate(judge.prompt_template.path, group=group),
        JudgeClient(
            judge.base_url,
            judge.model,
            usage,
            api_key=secret_value(secret, f"scorer {scorer.name}: judge.apiKeySecret") if secret else "",
            arguments=judge.arguments,
            max_connections=context.reward.workers.max_concurrent_samples,
        ),
        _parser(scorer.name, judge, group),
        Limiter(_budget(scorer, judge, context), scorer.name),
        TokenEstimate(judge.arguments),
        _report(scorer.name, usage, context),
        _traceparent(context),
    )


def _parser(name: str, judge: JudgeSpec, group: bool) -> Parser:
    parse = judge.parse
    if parse.python is not None:
        target = Target(
            path=parse.python.path,
            function=parse.python.function,
            arguments=dict(parse.python.arguments),
            scope="answers" if group else "answer",
        )
        return FunctionParser(FunctionScorer(name, target, processes=1))
    return RegexParser(parse.regex, group=group) if parse.regex else JsonParser(parse.json_path, group=group)


def _budget(scorer: ScorerSpec, judge: JudgeSpec, context: BuildContext) -> Budget:
    if scorer.limits is None:
        return LocalBudget(RateLimits())
    given = scorer.limits
    limits = RateLimits(given.requests_per_minute, given.tokens_per_minute, given.concurrency)
    if given.shared is not None:
        secret = given.shared.password_secret
        password = secret_value(secret, f"scorer {scorer.name}: limits.shared.passwordSecret") if secret else ""
        address, key = RedisAddress(given.shared.url, password), f"plaudit:limits:{{{given.shared.key}}}"
    elif context.redis is not None:
        # Scorers that call the same model at the same endpoint share its budget.
        endpoint = hashlib.sha256(f"{judge.base_url.rstrip('/')} {judge.model}".encode()).hexdigest()[:16]
        address, key = context.redis, f"plaudit:{{{context.run}}}:limits:{endpoint}"
    else:
        logger.warning("the judge's limits apply to this process only", judge=scorer.name)
        return LocalBudget(limits)
    return RedisBudget(address.client(timeout_s=_TIMEOUT_S, retries=_RETRIES), key, context.worker, limits)


def _report(name: str, usage: EndpointUsage, context: BuildContext) -> UsageReport | None:
    if context.redis is None:
        return None
    return UsageReport(name, usage, context.redis.client(timeout_s=_TIMEOUT_S, retries=0), context.run)


def _traceparent(context: BuildContext) -> Callable[[Sample], str] | None:
    run, share = context.run, context.traced_share
    if share is None:
        return None
    return lambda sample: traceparent(
        run, sample.group, sample.index, sampled=drawn(run, sample.group, sample.index, share)
    )
