"""Build the pipeline of a job from ``spec.reward``, with its scorers opened. The kinds of scorers: ``kinds``.

Decide if a job's groups are scored after their samples. The trainer admits groups accordingly.

The arguments of the functions that make scorers, besides the scorer's own section.

The parts that scorers of an endpoint share: limits over all workers, the report of usage, the trace header.

``kind: environment``.

``kind: http``.

``kind: judge``.

``kind: model``.

``kind: python``, and the job's own combining function.

Map each kind of scorer to the function that makes it.

``kind: rule``.

The servers of a scorer's model, as the reward worker reaches them.

``kind: service``.

The version of a job's scoring: a short digest of everything that decides a score. Every result carries it.

The function of a ``python`` scorer, as its child processes load it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec

from plaudit_job.load import job_data, section_data
from plaudit_job.secrets import secret_value
from plaudit_job.spec.rewards import JudgeSpec, PythonScorerSpec, RewardSpec, ScorerSpec
from plaudit_job.spec.rljob import RLJob
from plaudit_reward.attempts import Combiner, FunctionCombiner, GroupStage, Rules, Stage, WeightedSum, When
from plaudit_reward.endpoint.access import EndpointUsage, UsageReport
from plaudit_reward.endpoint.budget import Budget, Limiter, LocalBudget, RateLimits, RedisBudget
from plaudit_reward.endpoint.cache import CachedScorer, ScoreCache, sample_key, whole_sample_key
from plaudit_reward.endpoint.judge import (
    FunctionParser,
    JsonParser,
    JudgeClient,
    JudgeScorer,
    Parser,
    PromptTemplate,
    RegexParser,
    TokenEstimate,
)
from plaudit_reward.endpoint.remote import SERVICE, RemoteClient, RemoteScorer
from plaudit_reward.endpoint.served import TOKEN_VARIABLE, CallGate, LocalRouter, ModelScorer, ServerPool
from plaudit_reward.endpoint.shapes import CALLER_HEADER, SHAPES
from plaudit_reward.functions.function import declares_post_process
from plaudit_reward.functions.result import ServedModel, Target
from plaudit_reward.isolation.function_scorer import FunctionScorer, PostProcess, Router
from plaudit_reward.pipeline import Pipeline
from plaudit_reward.rules.scorer import RuleScorer
from plaudit_reward.scorer import GroupScorer, InlineScorer, Scorer, agent_reward
from plaudit_wire.errors import ConfigurationError, RefusedError
from plaudit_wire.logs import drawn, get_logger, traceparent
from plaudit_wire.names import Names
from plaudit_wire.records import Sample
from plaudit_wire.redis import RedisAddress
from plaudit_workers.process import model_servers


@dataclass(frozen=True)
class BuildContext:
    """Describe the environment in which scorers run."""

    reward: RewardSpec
    """The job's section, paths absolute."""
    worker: str
    """Name of this process."""
    run: str = ""
    """Id of the run; empty outside of one (``plaudit score``)."""
    redis: RedisAddress | None = None
    """The run's Redis; None outside of a run, where this process shares limits with no other."""
    model_servers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Places of the servers of each scorer whose model the job serves, by the scorer's name."""
    gate: CallGate = field(default_factory=CallGate)
    """Holds the calls to those of them that sleep during updates."""
    version: str = ""
    """Of the job's scoring (``scoring.version``); empty outside of a run."""
    traced_share: float | None = None
    """Share of the samples whose spans are kept (``metrics.traces``); None: nothing is traced."""


AnyScorer = Scorer | GroupScorer

Maker = Callable[[ScorerSpec, BuildContext], AnyScorer]

"""Make a scorer without starting anything; ``open`` starts it. Raise ``ConfigurationError`` or ``RefusedError``."""


_DIGITS = 10

_SIZES = ("workers", "gateway", "networkPolicy")

"""Sections of ``spec.reward`` that decide where samples are scored, and not how."""


def scoring_version(job: RLJob) -> str:
    """Return the version of a resolved job: the same for equal scorers, and for equal contents of the files they name.

    The contents of models' folders, of modules that a file imports, and of images are not part of it; an operator
    therefore gives its workers a version of its own (``PLAUDIT_SCORING_VERSION``).
    """
    reward = job_data(job)["spec"]["reward"]
    parts = {name: section for name, section in reward.items() if name not in _SIZES}
    return hashlib.sha256(msgspec.json.encode(_with_contents(parts), order="sorted")).hexdigest()[:_DIGITS]


def scorer_version(scorer: ScorerSpec) -> str:
    """Return the version of one scorer of a resolved job, without what does not change its own value."""
    written = section_data(scorer)
    parts = {name: part for name, part in written.items() if name not in _NOT_OF_ITS_VALUE}
    return hashlib.sha256(msgspec.json.encode(_with_contents(parts), order="sorted")).hexdigest()[:_DIGITS]


_NOT_OF_ITS_VALUE = ("weight", "when", "limits", "cache", "retries", "timeoutSeconds", "onFailure")


def _with_contents(part: Any) -> Any:
    """Replace every ``path`` that is a readable file by a digest of its content."""
    if isinstance(part, Mapping):
        return {name: _content(value) if name == "path" else _with_contents(value) for name, value in part.items()}
    if isinstance(part, list):
        return [_with_contents(item) for item in part]
    return part


def _content(path: Any) -> Any:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except (OSError, TypeError):
        return path


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


def function_target(scorer: ScorerSpec, function: PythonScorerSpec) -> Target:
    """Return the target of a scorer's function; the address of a served model is filled in when its router runs."""
    serve = function.serve
    return Target(
        path=function.path,
        function=function.function,
        arguments=dict(function.arguments),
        scope=scorer.scope,
        isolation=scorer.isolation,
        served=ServedModel(serve.source, serve.revision, serve.trust_remote_code) if serve else None,
    )


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


def environment_scorer(scorer: ScorerSpec, context: BuildContext) -> InlineScorer:
    """Make the scorer of rewards that tools and environments gave."""
    return InlineScorer(scorer.name, agent_reward)


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


def rule_scorer(scorer: ScorerSpec, context: BuildContext) -> RuleScorer:
    """Make the scorer of a built-in rule."""
    processes = context.reward.workers.processes
    return RuleScorer(scorer.name, scorer.rule, scorer.rule_arguments, processes=processes)


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


MAKERS: dict[str, Maker] = {
    "rule": rule_scorer,
    "python": python_scorer,
    "model": model_scorer,
    "judge": judge_scorer,
    "http": http_scorer,
    "service": service_scorer,
    "environment": environment_scorer,
}


async def build_pipeline(reward: RewardSpec, worker: str, context: BuildContext | None = None) -> Pipeline:
    """Build and open every scorer of a job; if one is refused, close all others.

    Args:
        context: the environment of the scorers. Default: outside a run.
    """
    context = context or BuildContext(reward, worker, model_servers=model_servers())
    made = _made(reward, context)
    combining = _combining(context)
    await _opened([*made, combining] if combining else made)
    stages: list[Stage] = []
    group_stages: list[GroupStage] = []
    for scorer, built in zip(reward.scorers, made, strict=True):
        _place(built, _rules(scorer, reward), scorer.scope, stages, group_stages)
    return Pipeline(
        stages,
        group_stages,
        combiner=_combiner(combining, reward),
        timeout_s=reward.timeout_seconds,
        worker=worker,
        normalize=reward.combine.normalize == "group",
    )


def _made(reward: RewardSpec, context: BuildContext) -> list[AnyScorer]:
    made, problems = [], []
    for scorer in reward.scorers:
        try:
            made.append(MAKERS[scorer.kind](scorer, context))
        except (ConfigurationError, RefusedError) as error:
            problems.append(str(error))
    if problems:
        raise RefusedError("\n".join(problems))
    return made


async def _opened(scorers: Sequence[AnyScorer]) -> None:
    """Open all concurrently; if one is refused, close all and report every refusal."""
    outcomes = await asyncio.gather(*(scorer.open() for scorer in scorers), return_exceptions=True)
    problems = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if not problems:
        return
    await asyncio.gather(*(scorer.close() for scorer in scorers))
    others = [problem for problem in problems if not isinstance(problem, ConfigurationError)]
    raise others[0] if others else RefusedError("\n".join(str(problem) for problem in problems))


def _combining(context: BuildContext) -> FunctionScorer | None:
    reward = context.reward
    if reward.combine.kind != "python":
        return None
    return function_scorer("combine", Target(reward.combine.path, reward.combine.function, scope="combine"), context)


def _combiner(function: FunctionScorer | None, reward: RewardSpec) -> Combiner:
    if function is None:
        return WeightedSum()
    return FunctionCombiner(function, timeout_s=reward.timeout_seconds, retries=reward.retries)


def _rules(scorer: ScorerSpec, reward: RewardSpec) -> Rules:
    return Rules(
        weight=scorer.weight,
        retries=reward.retries if scorer.retries is None else scorer.retries,
        timeout_s=scorer.timeout_seconds,
        on_failure=scorer.on_failure or reward.on_failure,
        when=When(scorer.when.scorer, scorer.when.equals) if scorer.when is not None else None,
    )


def _place(built: AnyScorer, rules: Rules, scope: str, stages: list[Stage], group_stages: list[GroupStage]) -> None:
    """Add a scorer to the stages of its scope; a class with ``post_process_scores`` goes into both."""
    if scope == "group":
        replaces = isinstance(built, FunctionScorer) and built.replaces_values
        group_stages.append(GroupStage(cast(GroupScorer, built), rules, replaces=replaces))
        return
    stages.append(Stage(cast(Scorer, built), rules))
    scorer = built.scorer if isinstance(built, CachedScorer) else built
    if isinstance(scorer, FunctionScorer) and scorer.post_processes:
        group_stages.append(GroupStage(PostProcess(scorer), rules, of=scorer.name))


def has_group_scorers(reward: RewardSpec) -> bool:
    """Return True if a scorer has group scope or ``post_process_scores``, or values are normalised by group.

    The files are read, not run.
    """
    return reward.combine.normalize == "group" or any(
        scorer.scope == "group"
        or (scorer.python is not None and declares_post_process(scorer.python.path, scorer.python.function))
        for scorer in reward.scorers
    )
