"""``kind: judge``."""

from __future__ import annotations

from plaudit_reward.endpoint.usage import EndpointUsage
from plaudit_reward.functions.target import Target
from plaudit_reward.isolation.function_scorer import FunctionScorer
from plaudit_reward.judge.client import JudgeClient
from plaudit_reward.judge.estimate import TokenEstimate
from plaudit_reward.judge.parse import FunctionParser, JsonParser, Parser, RegexParser
from plaudit_reward.judge.prompt import PromptTemplate
from plaudit_reward.judge.scorer import JudgeScorer
from plaudit_workers.job.secrets import secret_value
from plaudit_workers.job.spec.rewards.scorers import JudgeSpec, ScorerSpec
from plaudit_workers.scoring.kinds.context import AnyScorer, BuildContext
from plaudit_workers.scoring.kinds.endpoint import cached, limiter, trace_header, usage_report
from plaudit_workers.scoring.kinds.served import server_pool


def judge_scorer(scorer: ScorerSpec, context: BuildContext) -> AnyScorer:
    """Build a judge: an endpoint and the limits that all workers share."""
    assert scorer.judge is not None
    judge = scorer.judge
    group = scorer.scope == "group"
    secret = judge.api_key_secret
    usage = EndpointUsage()
    endpoint = f"served {scorer.name}" if judge.serve else f"{judge.base_url.rstrip('/')} {judge.model}"
    built = JudgeScorer(
        scorer.name,
        PromptTemplate(judge.prompt_template.path, group=group),
        JudgeClient(
            judge.base_url or f"the model served for {scorer.name}",
            judge.model or scorer.name,
            usage,
            api_key=secret_value(secret, f"scorer {scorer.name}: judge.apiKeySecret") if secret else "",
            arguments=judge.arguments,
            max_connections=context.reward.workers.max_concurrent_samples,
            pool=server_pool(scorer, context) if judge.serve else None,
        ),
        _parser(scorer.name, judge, group, context),
        limiter(scorer, endpoint, context),
        TokenEstimate(judge.arguments),
        usage_report(scorer.name, usage, context),
        trace_header(context),
    )
    return built if group else cached(built, scorer, usage, context)


def _parser(name: str, judge: JudgeSpec, group: bool, context: BuildContext) -> Parser:
    parse = judge.parse
    if parse.python is not None:
        target = Target(
            path=parse.python.path,
            function=parse.python.function,
            arguments=dict(parse.python.arguments),
            scope="answers" if group else "answer",
        )
        return FunctionParser(FunctionScorer(name, target, processes=1, traceparent=trace_header(context)))
    return RegexParser(parse.regex, group=group) if parse.regex else JsonParser(parse.json_path, group=group)
