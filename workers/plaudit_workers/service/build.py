"""Build the pipeline of a job from ``spec.reward``: its scorers by their kinds, opened; and name the scoring's version.

``MAKERS``, at the end, maps each kind of scorer to the function that makes it from its section and a ``BuildContext``.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from plaudit_job.load import job_data, section_data
from plaudit_job.rules.answers import answer_schema, score_path
from plaudit_job.secrets import secret_value
from plaudit_job.spec.rewards import JudgeSpec, PythonScorerSpec, RewardSpec, ScorerSpec
from plaudit_job.spec.rljob import RLJob
from plaudit_job.spec.section import SecretKey
from plaudit_reward.attempts import Combiner, FunctionCombiner, GroupStage, Rules, Stage, WeightedSum, When
from plaudit_reward.endpoint.access import EndpointUsage, UsageReport
from plaudit_reward.endpoint.budget import Budget, Limiter, LocalBudget, RateLimits, RedisBudget
from plaudit_reward.endpoint.cache import CachedScorer, ScoreCache, sample_key, whole_sample_key
from plaudit_reward.endpoint.remote import SERVICE, RemoteClient, RemoteScorer
from plaudit_reward.endpoint.served import TOKEN_VARIABLE, CallGate, LocalRouter, ModelScorer, ServerPool
from plaudit_reward.endpoint.shapes import CALLER_HEADER, SHAPES
from plaudit_reward.functions.function import user_files
from plaudit_reward.functions.result import ServedModel, Target
from plaudit_reward.http import Token
from plaudit_reward.isolation.function_scorer import FunctionScorer, PostProcess, Router
from plaudit_reward.machines import RunMachines
from plaudit_reward.pipeline import Pipeline
from plaudit_reward.scorer import GroupScorer, InlineScorer, Scorer, agent_reward
from plaudit_reward.verifier import VerifierScorer
from plaudit_wire.errors import ConfigurationError, RefusedError
from plaudit_wire.logs import drawn, get_logger, traceparent
from plaudit_wire.names import Names
from plaudit_wire.records import Sample
from plaudit_wire.redis import RedisAddress
from plaudit_workers.process import model_servers

if TYPE_CHECKING:
    from plaudit_reward.endpoint.judge import Parser


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
    """Of the job's scoring (``scoring_version``); empty outside of a run."""
    machines: RunMachines | None = None
    """The machines of the run's samples; None for a job without, and outside of a run."""
    max_concurrent_tests: int = 1
    """Tests that this process runs in machines at the same time."""
    traced_share: float | None = None
    """Share of the samples whose spans are kept (``metrics.traces``); None: nothing is traced."""


AnyScorer = Scorer | GroupScorer
Maker = Callable[[ScorerSpec, BuildContext], AnyScorer]
"""Make a scorer without starting anything; ``open`` starts it. Raise ``ConfigurationError`` or ``RefusedError``."""


async def build_pipeline(reward: RewardSpec, worker: str, context: BuildContext | None = None) -> Pipeline:
    """Build and open every scorer of a reward, by default outside of a run; if one is refused, close all others.

    Scorers that only audit are left out (``RewardSpec.alone`` makes a section of one of them).
    """
    reward = reward.rewarding
    context = context or BuildContext(reward, worker, model_servers=model_servers())
    made = _make_all(reward, context)
    combining = None
    if reward.combine.kind == "python":
        target = Target(reward.combine.path, reward.combine.function, scope="combine")
        combining = _function_scorer("combine", target, context)
    await _open_all([*made, combining] if combining else made)
    combiner: Combiner = WeightedSum()
    if combining is not None:
        combiner = FunctionCombiner(combining, timeout_s=reward.timeout_seconds, retries=reward.retries)
    stages: list[Stage] = []
    group_stages: list[GroupStage] = []
    for scorer, built in zip(reward.scorers, made, strict=True):
        _stage(built, _rules(scorer, reward), scorer.scope, stages, group_stages)
    return Pipeline(
        stages,
        group_stages,
        combiner=combiner,
        timeout_s=reward.timeout_seconds,
        worker=worker,
        normalize=reward.combine.normalize == "group",
    )


def _make_all(reward: RewardSpec, context: BuildContext) -> list[AnyScorer]:
    made, problems = [], []
    for scorer in reward.scorers:
        try:
            made.append(MAKERS[scorer.kind](scorer, context))
        except (ConfigurationError, RefusedError) as error:
            problems.append(str(error))
    if problems:
        raise RefusedError("\n".join(problems))
    return made


async def _open_all(scorers: Sequence[AnyScorer]) -> None:
    """Open all concurrently; if one is refused, close all and report every refusal."""
    outcomes = await asyncio.gather(*(scorer.open() for scorer in scorers), return_exceptions=True)
    problems = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if not problems:
        return
    await asyncio.gather(*(scorer.close() for scorer in scorers))
    others = [problem for problem in problems if not isinstance(problem, ConfigurationError)]
    raise others[0] if others else RefusedError("\n".join(str(problem) for problem in problems))


def _rules(scorer: ScorerSpec, reward: RewardSpec) -> Rules:
    return Rules(
        weight=scorer.weight,
        retries=reward.retries if scorer.retries is None else scorer.retries,
        timeout_s=scorer.timeout_seconds,
        on_failure=scorer.on_failure or reward.on_failure,
        on_none=scorer.on_none,
        when=When(scorer.when.scorer, scorer.when.equals) if scorer.when is not None else None,
    )


def _stage(built: AnyScorer, rules: Rules, scope: str, stages: list[Stage], group_stages: list[GroupStage]) -> None:
    """Add a scorer to the stages of its scope; a class with ``post_process_scores`` goes into both."""
    if scope == "group":
        replaces = isinstance(built, FunctionScorer) and built.replaces_values
        group_stages.append(GroupStage(cast(GroupScorer, built), rules, replaces=replaces))
        return
    stages.append(Stage(cast(Scorer, built), rules))
    scorer = built.scorer if isinstance(built, CachedScorer) else built
    if isinstance(scorer, FunctionScorer) and scorer.post_processes:
        group_stages.append(GroupStage(PostProcess(scorer), rules, of=scorer.name))


_DIGITS = 10
_SIZES = ("workers", "gateway", "networkPolicy")
"""Sections of ``spec.reward`` that decide where samples are scored, and not how."""
_NOT_OF_ITS_VALUE = ("drift", "weight", "when", "limits", "cache", "retries", "timeoutSeconds", "onFailure", "onNone")


def scoring_version(job: RLJob) -> str:
    """Return a short digest of everything that decides a score of a resolved job; every result carries it.

    It is the same for equal scorers, and for equal contents of the files they name and of the modules beside them that
    these import. The contents of models' folders and of images are not part of it; an operator therefore gives its
    workers a version of its own (``PLAUDIT_SCORING_VERSION``).
    """
    reward = job_data(job)["spec"]["reward"]
    scorers = [
        {name: part for name, part in scorer.items() if name != "drift"}
        for scorer in reward["scorers"]
        if "audit" not in scorer
    ]
    return _digest({name: section for name, section in reward.items() if name not in _SIZES} | {"scorers": scorers})


def _scorer_version(scorer: ScorerSpec) -> str:
    """Return the version of one scorer of a resolved job, without what does not change its own value."""
    return _digest({name: part for name, part in section_data(scorer).items() if name not in _NOT_OF_ITS_VALUE})


def _digest(parts: Mapping[str, Any]) -> str:
    return hashlib.sha256(msgspec.json.encode(_with_contents(parts), order="sorted")).hexdigest()[:_DIGITS]


def _with_contents(part: Any) -> Any:
    """Replace every ``path`` that is a readable file by a digest of its content."""
    if isinstance(part, Mapping):
        return {name: _content(value) if name == "path" else _with_contents(value) for name, value in part.items()}
    if isinstance(part, list):
        return [_with_contents(item) for item in part]
    return part


def _content(path: Any) -> Any:
    try:
        content = Path(path).read_bytes()
    except (OSError, TypeError):
        return path
    modules = [each for file, each in sorted(user_files(path).items()) if file != path] if path.endswith(".py") else []
    return hashlib.sha256(b"\0".join([content, *modules])).hexdigest()


logger = get_logger(__name__)
_TIMEOUT_S = 5.0
_RETRIES = 3


def _budget(scorer: ScorerSpec, endpoint: str, context: BuildContext) -> Budget:
    """Build the budget of an endpoint, which scorers of a run that name the same one share."""
    if scorer.limits is None:
        return LocalBudget(RateLimits())
    given = scorer.limits
    limits = RateLimits(given.requests_per_minute, given.tokens_per_minute, given.concurrency)
    if given.shared is not None:
        password = _secret(given.shared.password_secret, f"scorer {scorer.name}: limits.shared.passwordSecret")
        address, key = RedisAddress(given.shared.url, password), f"plaudit:limits:{{{given.shared.key}}}"
    elif context.redis is not None:
        digest = hashlib.sha256(endpoint.encode()).hexdigest()[:16]
        address, key = context.redis, f"plaudit:{{{context.run}}}:limits:{digest}"
    else:
        logger.warning("limits apply to this process only", scorer=scorer.name)
        return LocalBudget(limits)
    return RedisBudget(address.client(timeout_s=_TIMEOUT_S, retries=_RETRIES), key, context.worker, limits)


def _secret(secret: SecretKey | None, field: str) -> str:
    return secret_value(secret, field) if secret else ""


def _token(secret: SecretKey | None, field: str) -> Token:
    """Return how to read a key that may be replaced while the worker runs."""
    return partial(secret_value, secret, field) if secret else ""


def _usage_report(name: str, usage: EndpointUsage, context: BuildContext) -> UsageReport | None:
    """Build the report of an endpoint's usage to the run; None outside of a run."""
    if context.redis is None:
        return None
    return UsageReport(name, usage, context.redis.client(timeout_s=_TIMEOUT_S, retries=0), context.run)


def _cached(built: Scorer, scorer: ScorerSpec, usage: EndpointUsage, context: BuildContext) -> Scorer:
    """Put the cache of a scorer of an endpoint in front of it, if it has one; outside of a run nothing is kept."""
    cache = _cache(scorer, context, _scorer_version(scorer))
    return built if cache is None else CachedScorer(built, cache, usage)


def _cached_in_run(
    built: Scorer, scorer: ScorerSpec, context: BuildContext, key: Callable[[Sample], bytes | None] = sample_key
) -> Scorer:
    """Put the cache of a scorer that runs in the job in front of it, if it has one.

    Its scores depend on files and images that the scorer's section does not show, so each version of the whole scoring
    has entries of its own.
    """
    cache = _cache(scorer, context, f"{_scorer_version(scorer)}:{context.version}")
    if cache is None:
        return built
    usage = EndpointUsage()
    return CachedScorer(built, cache, usage, _usage_report(scorer.name, usage, context), key)


def _cache(scorer: ScorerSpec, context: BuildContext, version: str) -> ScoreCache | None:
    if scorer.cache is None or context.redis is None:
        return None
    client = context.redis.client(timeout_s=_TIMEOUT_S, retries=0)
    prefix = f"{Names(context.run).prefix}cache:{version}"
    return ScoreCache(client, prefix, scorer.cache.lifetime_seconds, scorer.cache.entries)


def _trace_header(context: BuildContext) -> Callable[[Sample], str] | None:
    """Return the function that gives a sample's ``traceparent``; None where nothing is traced."""
    run, share = context.run, context.traced_share
    if share is None:
        return None
    return lambda sample: traceparent(
        run, sample.group, sample.index, sampled=drawn(run, sample.group, sample.index, share)
    )


def _server_pool(scorer: ScorerSpec, context: BuildContext) -> ServerPool:
    sleeps = scorer.served is not None and scorer.served.sleep_during_updates
    return ServerPool(
        scorer.name,
        context.model_servers.get(scorer.name, ()),
        max_concurrent=context.reward.workers.max_concurrent_samples,
        token=os.environ.get(TOKEN_VARIABLE, ""),
        gate=context.gate if sleeps else None,
    )


def _rule_scorer(scorer: ScorerSpec, context: BuildContext) -> Scorer:
    from plaudit_reward.rules.scorer import RuleScorer  # 100 modules, with mpmath

    processes = context.reward.workers.processes
    return RuleScorer(scorer.name, scorer.rule, scorer.rule_arguments, processes=processes)


def _environment_scorer(scorer: ScorerSpec, context: BuildContext) -> InlineScorer:
    return InlineScorer(scorer.name, agent_reward)


def _verifier_scorer(scorer: ScorerSpec, context: BuildContext) -> VerifierScorer:
    if context.machines is None:
        raise RefusedError(
            f"scorer {scorer.name} (kind verifier) runs tests in the machines of a run's samples, and there are none "
            "outside of a run: check the tasks and their tests with plaudit tasks"
        )
    return VerifierScorer(scorer.name, context.machines, context.max_concurrent_tests)


def _python_scorer(scorer: ScorerSpec, context: BuildContext) -> AnyScorer:
    assert scorer.python is not None
    router = None
    if scorer.python.serve is not None:
        limit_s = scorer.timeout_seconds or context.reward.timeout_seconds
        router = LocalRouter(_server_pool(scorer, context), limit_s)
    built = _function_scorer(scorer.name, function_target(scorer, scorer.python), context, router)
    return _cached_in_run(built, scorer, context, whole_sample_key) if scorer.scope == "sample" else built


def function_target(scorer: ScorerSpec, function: PythonScorerSpec) -> Target:
    """Return the function as its child processes load it; its router fills in the address of a served model."""
    serve = function.serve
    return Target(
        path=function.path,
        function=function.function,
        arguments=dict(function.arguments),
        scope=scorer.scope,
        isolation=scorer.isolation,
        served=ServedModel(serve.source, serve.revision, serve.trust_remote_code) if serve else None,
    )


def _function_scorer(name: str, target: Target, context: BuildContext, router: Router | None = None) -> FunctionScorer:
    workers = context.reward.workers
    return FunctionScorer(
        name,
        target,
        processes=workers.processes,
        max_concurrent=workers.max_concurrent_samples,
        traceparent=_trace_header(context),
        router=router,
    )


def _model_scorer(scorer: ScorerSpec, context: BuildContext) -> Scorer:
    assert scorer.model is not None
    built = ModelScorer(
        _server_pool(scorer, context),
        form=scorer.model.input,
        max_concurrent=context.reward.workers.max_concurrent_samples,
        traceparent=_trace_header(context),
    )
    return _cached_in_run(built, scorer, context)


def _judge_scorer(scorer: ScorerSpec, context: BuildContext) -> AnyScorer:
    from plaudit_reward.endpoint.judge import JudgeClient, JudgeScorer, PromptTemplate, TokenEstimate  # and jinja2

    assert scorer.judge is not None
    judge, group, usage = scorer.judge, scorer.scope == "group", EndpointUsage()
    endpoint = f"served {scorer.name}" if judge.serve else f"{judge.base_url.rstrip('/')} {judge.model}"
    built = JudgeScorer(
        scorer.name,
        PromptTemplate(judge.prompt_template.path, group=group),
        JudgeClient(
            judge.base_url or f"the model served for {scorer.name}",
            judge.model or scorer.name,
            usage,
            api_key=_token(judge.api_key_secret, f"scorer {scorer.name}: judge.apiKeySecret"),
            arguments=judge.arguments,
            max_connections=context.reward.workers.max_concurrent_samples,
            pool=_server_pool(scorer, context) if judge.serve else None,
        ),
        _judge_parser(scorer.name, judge, group, context),
        Limiter(_budget(scorer, endpoint, context), scorer.name),
        TokenEstimate(judge.arguments),
        _usage_report(scorer.name, usage, context),
        _trace_header(context),
        limits=_judge_limits(judge),
        schema=_judge_schema(judge, group),
    )
    return built if group else _cached(built, scorer, usage, context)


def _judge_limits(judge: JudgeSpec) -> tuple[float, float] | None:
    return (judge.parse.range.min, judge.parse.range.max) if judge.parse.range is not None else None


def _judge_schema(judge: JudgeSpec, group: bool) -> Callable[[int], Mapping[str, Any]] | None:
    """Return the schema of an answer about so many samples; None where the endpoint is asked for no form."""
    if not judge.parse.structured:
        return None
    steps, limits = score_path(judge.parse.json_path), _judge_limits(judge)
    return lambda count: answer_schema(steps, limits, count if group else None)


def _judge_parser(name: str, judge: JudgeSpec, group: bool, context: BuildContext) -> Parser:
    from plaudit_reward.endpoint.judge import FunctionParser, JsonParser, RegexParser

    parse = judge.parse
    if parse.python is not None:
        target = Target(
            path=parse.python.path,
            function=parse.python.function,
            arguments=dict(parse.python.arguments),
            scope="answers" if group else "answer",
        )
        return FunctionParser(FunctionScorer(name, target, processes=1, traceparent=_trace_header(context)))
    limits = _judge_limits(judge)
    highest = limits[1] if limits else None
    if parse.regex:
        return RegexParser(parse.regex, group=group, highest=highest)
    return JsonParser(parse.json_path, group=group, highest=highest)


def _http_scorer(scorer: ScorerSpec, context: BuildContext) -> Scorer:
    assert scorer.http is not None
    http, usage = scorer.http, EndpointUsage()
    client = RemoteClient(
        http.url,
        SHAPES[http.shape],
        usage,
        api_key=_token(http.api_key_secret, f"scorer {scorer.name}: http.apiKeySecret"),
        arguments=http.arguments,
        path=http.json_path,
        max_connections=context.reward.workers.max_concurrent_samples,
    )
    return _remote_scorer(scorer, client, http.url, usage, context)


def _service_scorer(scorer: ScorerSpec, context: BuildContext) -> Scorer:
    """Build the client of a reward service; the run is a caller of its own among those that share a token."""
    assert scorer.service is not None
    service, usage = scorer.service, EndpointUsage()
    field = f"scorer {scorer.name}: service"
    if not service.url:
        raise RefusedError(
            f"{field}.name: {service.name!r} is a name on Kubernetes only. Under plaudit run give url and tokenSecret"
        )
    client = RemoteClient(
        f"{service.url.rstrip('/')}/v1/score",
        SHAPES["plaudit"],
        usage,
        api_key=_token(service.token_secret, f"{field}.tokenSecret"),
        headers={CALLER_HEADER: context.run} if context.run else {},
        max_connections=context.reward.workers.max_concurrent_samples,
        remedies=SERVICE,
    )
    return _remote_scorer(scorer, client, service.url, usage, context)


def _remote_scorer(
    scorer: ScorerSpec, client: RemoteClient, endpoint: str, usage: EndpointUsage, context: BuildContext
) -> Scorer:
    """Put the limits that all workers share and the cache in front of an endpoint's client."""
    report = _usage_report(scorer.name, usage, context)
    limiter = Limiter(_budget(scorer, endpoint, context), scorer.name)
    built = RemoteScorer(scorer.name, client, limiter, report, _trace_header(context))
    return _cached(built, scorer, usage, context)


MAKERS: dict[str, Maker] = {
    "rule": _rule_scorer,
    "python": _python_scorer,
    "model": _model_scorer,
    "judge": _judge_scorer,
    "http": _http_scorer,
    "service": _service_scorer,
    "environment": _environment_scorer,
    "verifier": _verifier_scorer,
}
"""By kind; ``spec.rewards.KINDS`` describes each."""
