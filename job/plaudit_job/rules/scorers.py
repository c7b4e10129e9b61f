"""Check the scorers of a job against each other, each against its kind, and the endpoints that they call."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from urllib.parse import urlsplit

from plaudit_job.problem import Problem, did_you_mean, nearest
from plaudit_job.rules.answers import answer_schema, json_path, score_path, score_pattern
from plaudit_job.rules.arguments import RULE_ARGUMENTS, read_arguments
from plaudit_job.spec.rewards import KINDS, JudgeSpec, ScorerSpec, ServiceSpec, kinds_with
from plaudit_job.spec.rljob import Spec
from plaudit_job.spec.section import differs
from plaudit_wire.errors import ConfigurationError

_OWN_MEMBERS = ("model", "messages", "stream", "n")
"""Members of a judge's request that Plaudit sets."""
_PRIVATE_DOMAINS = (".svc", ".local", ".localhost", ".internal", ".lan", ".home.arpa")


def scorer_problems(spec: Spec) -> Iterator[Problem]:
    """Yield every contradiction between scorers, and between them and ``combine``."""
    for index, scorer in enumerate(spec.reward.scorers):
        field = f"spec.reward.scorers[{index}]"
        earlier = spec.reward.scorers[:index]
        yield from _name(field, scorer, earlier)
        yield from _kind(field, scorer)
        yield from _when(field, scorer, earlier)
        yield from _scope(field, scorer, spec)
        yield from _judge_problems(field, scorer)
        yield from _http_problems(field, scorer)
        yield from _service_problems(f"{field}.service", scorer.service)
        yield from _limits_problems(field, scorer)
        yield from _audit(field, scorer, spec)
    if spec.reward.gateway.canary:
        yield from _service_problems("spec.reward.gateway.canary.service", spec.reward.gateway.canary.service)
    yield from _combine(spec)


def _name(field: str, scorer: ScorerSpec, earlier: list[ScorerSpec]) -> Iterator[Problem]:
    if any(other.name == scorer.name for other in earlier):
        yield Problem(f"{field}.name", f"{scorer.name!r} is used twice", "Give each scorer its own name")
    if scorer.served is not None and "_" in scorer.name:
        yield Problem(
            f"{field}.name",
            f"{scorer.name!r} has '_', which the names of a served model's pods cannot have",
            f"Use '-': {scorer.name.replace('_', '-')}",
            also=(f"{field}.{scorer.served_field}",),
        )


def _kind(field: str, scorer: ScorerSpec) -> Iterator[Problem]:
    section = KINDS[scorer.kind].section
    if section and not differs(scorer, section):
        yield Problem(
            f"{field}.{section}",
            f"is missing; kind {scorer.kind} requires it",
            f"Add {section}: {KINDS[scorer.kind].example}",
        )
    for name in dict.fromkeys(name for traits in KINDS.values() for name in traits.fields):
        kinds = kinds_with(name)
        if scorer.kind not in kinds and differs(scorer, name):
            yield Problem(
                f"{field}.{name}",
                f"applies to kind {' or '.join(kinds)} only, but this scorer has kind {scorer.kind}",
                f"Set kind to {kinds[0]}, or remove {name}",
                also=(f"{field}.kind",),
            )
    if scorer.kind == "rule" and scorer.rule is not None and scorer.rule not in RULE_ARGUMENTS:
        remedy = did_you_mean(nearest(scorer.rule, RULE_ARGUMENTS), f"Rules are {', '.join(sorted(RULE_ARGUMENTS))}")
        yield Problem(f"{field}.rule", f"there is no rule {scorer.rule!r}", remedy)
    elif scorer.kind == "rule":
        try:
            read_arguments(scorer.rule, scorer.rule_arguments)
        except ConfigurationError as error:
            remedy = "The arguments of each rule are in docs/rewards/rules.md"
            yield Problem(f"{field}.ruleArguments", str(error), remedy, also=(f"{field}.rule",))


def _when(field: str, scorer: ScorerSpec, earlier: list[ScorerSpec]) -> Iterator[Problem]:
    if scorer.when is None:
        return
    target = next((other for other in earlier if other.name == scorer.when.scorer), None)
    if target is None:
        names = ", ".join(other.name for other in earlier) or "none, this is the first"
        yield Problem(
            f"{field}.when.scorer",
            f"{scorer.when.scorer!r} is not an earlier scorer in the list (earlier: {names})",
            "Name an earlier scorer, or move this one after it",
            also=tuple(f"spec.reward.scorers[{i}].name" for i in range(len(earlier))),
        )
    elif target.audit is not None:
        yield Problem(
            f"{field}.when.scorer",
            f"{target.name!r} audits: it scores a few groups, after their step",
            "Name a scorer without audit",
        )
    elif target.scope == "group":
        yield Problem(
            f"{field}.when.scorer",
            f"{target.name!r} scores groups, after all their samples are scored",
            "Name a scorer with scope sample",
        )


def _audit(field: str, scorer: ScorerSpec, spec: Spec) -> Iterator[Problem]:
    """Check a scorer that audits, or is watched: it reads stored samples."""
    if scorer.drift is not None and not spec.trains:
        yield Problem(
            f"{field}.drift",
            "asks again about the samples of the first step, but this job has no trainer",
            "Set it in the job that trains, which may call this service (kind: service)",
        )
    if scorer.audit is not None and not spec.trains and scorer.audit.every_steps != 1:
        yield Problem(f"{field}.audit.everySteps", "counts steps, but this job has no trainer", "Remove it")
    for name, given in (("audit", scorer.audit is not None), ("drift", scorer.drift is not None)):
        if given and not spec.metrics.keep_samples:
            yield Problem(
                f"{field}.{name}",
                "reads stored samples, but metrics.keepSamples is false",
                "Remove keepSamples: false, or this field",
                also=("spec.metrics.keepSamples",),
            )
    if scorer.drift is not None and scorer.scope == "group":
        remedy = "Remove it, or set scope to sample"
        yield Problem(f"{field}.drift", "scores single samples again, but scope is group", remedy)
    if scorer.audit is None:
        return
    for name, given, remedy in (
        ("weight", scorer.weight not in (0.0, 1.0), "Remove it: an auditor is no part of the reward"),
        ("when", scorer.when is not None, "Remove it: an auditor scores all samples of its groups"),
        ("onFailure", scorer.on_failure is not None, "Remove it: a failed audit is counted and changes nothing"),
        ("cache", scorer.cache is not None, "Remove it: an auditor scores every sample once"),
        ("drift", scorer.drift is not None, "Remove it: the first values of an auditor are no rewards"),
    ):
        if given:
            yield Problem(f"{field}.{name}", "cannot be combined with audit", remedy, also=(f"{field}.audit",))


def _scope(field: str, scorer: ScorerSpec, spec: Spec) -> Iterator[Problem]:
    if scorer.scope != "group":
        return
    if not KINDS[scorer.kind].scores_groups:
        possible = " or ".join(kind for kind, traits in KINDS.items() if traits.scores_groups)
        yield Problem(
            f"{field}.scope",
            f"kind {scorer.kind} scores one sample at a time and cannot have scope group",
            f"Set scope to sample, or use kind {possible}",
            also=(f"{field}.kind",),
        )
    if spec.trains and spec.algorithm.samples_per_prompt < 2:
        yield Problem(
            f"{field}.scope",
            f"group compares samples of a prompt, but samplesPerPrompt is {spec.algorithm.samples_per_prompt}",
            "Set samplesPerPrompt to 2 or more, or scope to sample",
            also=("spec.algorithm.samplesPerPrompt",),
        )
    if scorer.when is not None:
        yield Problem(
            f"{field}.when",
            "selects single samples, but scope is group",
            "Remove when, or set scope to sample",
            also=(f"{field}.scope",),
        )
    if scorer.cache is not None:
        yield Problem(f"{field}.cache", "applies to scope sample only", "Remove it, or set scope to sample")


def _combine(spec: Spec) -> Iterator[Problem]:
    scorers, combine = spec.reward.rewarding.scorers, spec.reward.combine
    if not scorers:
        yield Problem("spec.reward.scorers", "all audit, so nothing gives a reward", "Add a scorer without audit")
    elif combine.kind == "weightedSum" and all(scorer.weight == 0 for scorer in scorers):
        yield Problem(
            "spec.reward.scorers",
            "all have weight 0, so every reward is 0",
            "Give at least one a weight",
            also=tuple(f"spec.reward.scorers[{i}].weight" for i in range(len(scorers))),
        )
    if combine.kind == "python" and not (combine.path and combine.function):
        yield Problem(
            "spec.reward.combine", "lacks path or function; kind python requires both", "Give path and function"
        )
    if combine.normalize == "group":
        yield from _normalize(spec)
    if combine.kind == "weightedSum" and (combine.path or combine.function):
        yield Problem(
            "spec.reward.combine",
            "path and function apply to kind python only, but the kind is weightedSum",
            "Set kind to python, or remove them",
        )


def _normalize(spec: Spec) -> Iterator[Problem]:
    if spec.reward.combine.kind == "python":
        yield Problem(
            "spec.reward.combine.normalize",
            "group applies to kind weightedSum only, but the kind is python",
            "Set kind to weightedSum, or normalize in a function with scope group",
            also=("spec.reward.combine.kind",),
        )
    if not spec.trains:
        return
    algorithm = spec.algorithm
    if algorithm.samples_per_prompt < 2:
        yield Problem(
            "spec.reward.combine.normalize",
            f"group compares samples of a prompt, but samplesPerPrompt is {algorithm.samples_per_prompt}",
            "Set samplesPerPrompt to 2 or more, or remove normalize",
            also=("spec.algorithm.samplesPerPrompt",),
        )
    if algorithm.advantage == "grpo":
        yield Problem(
            "spec.algorithm.advantage",
            "grpo divides by the spread of a group's rewards, as combine.normalize already does for each scorer",
            "Set advantage to reinforcePlusPlus (GDPO: normalised over the batch) or drGrpo (no second division)",
            also=("spec.reward.combine.normalize",),
        )


def _judge_problems(field: str, scorer: ScorerSpec) -> Iterator[Problem]:
    if scorer.judge is None:
        return
    yield from _parse(f"{field}.judge.parse", scorer.judge)
    yield from _answer_form(f"{field}.judge", scorer.judge)
    yield from _place(f"{field}.judge", scorer.judge)
    yield from _base_url(f"{field}.judge.baseUrl", scorer.judge)
    for name in _OWN_MEMBERS:
        if name in scorer.judge.arguments:
            remedy = "Remove it; any other member may be set"
            yield Problem(f"{field}.judge.arguments.{name}", "is set by Plaudit", remedy)


def _parse(field: str, judge: JudgeSpec) -> Iterator[Problem]:
    parse = judge.parse
    ways = [
        name
        for name, given in (("regex", parse.regex), ("jsonPath", parse.json_path), ("python", parse.python))
        if given
    ]
    if len(ways) != 1:
        yield Problem(
            field,
            f"needs exactly one of jsonPath, regex and python, but has {' and '.join(ways) or 'none'}",
            "Give one",
        )
        return
    try:
        if judge.parse.regex:
            score_pattern(judge.parse.regex)
        elif judge.parse.json_path:
            score_path(judge.parse.json_path)
    except ConfigurationError as error:
        yield Problem(f"{field}.{ways[0]}", str(error), "Fix it")


def _answer_form(field: str, judge: JudgeSpec) -> Iterator[Problem]:
    parse = judge.parse
    if parse.range is not None and not parse.range.min < parse.range.max:
        yield Problem(f"{field}.parse.range", "has a min that is not below its max", "Give the rubric's numbers")
    if not parse.structured:
        return
    if "response_format" in judge.arguments:
        remedy = "Remove one of the two"
        yield Problem(f"{field}.parse.structured", "sets response_format, which arguments set, too", remedy)
    try:
        answer_schema(json_path(parse.json_path or "$"), None, None)
    except ValueError as error:
        yield Problem(
            f"{field}.parse.structured", f"needs a jsonPath of members: {error}", "Write it like $.score, or remove it"
        )


def _place(field: str, judge: JudgeSpec) -> Iterator[Problem]:
    """Check that the judge is either an endpoint or a model of the job."""
    if bool(judge.base_url) == (judge.serve is not None):
        has = "both" if judge.serve is not None else "none"
        yield Problem(
            f"{field}.baseUrl" if judge.base_url else field,
            f"needs exactly one of baseUrl and serve, but has {has}",
            "Give baseUrl and model of an endpoint, or serve: {source: …} for a model that the job serves",
        )
    if judge.base_url and not judge.model:
        yield Problem(f"{field}.model", "is missing; with baseUrl it is required", "Give the model's name there")
    if judge.serve is not None and judge.model:
        yield Problem(f"{field}.model", "names a model at baseUrl, but the job serves the judge", "Remove it")
    if judge.serve is not None and judge.api_key_secret is not None:
        yield Problem(f"{field}.apiKeySecret", "is for baseUrl, but the job serves the judge", "Remove it")


def _base_url(field: str, judge: JudgeSpec) -> Iterator[Problem]:
    yield from _address_problems(field, judge.base_url, has_key=judge.api_key_secret is not None)
    parts = urlsplit(judge.base_url)
    if parts.path.rstrip("/").endswith("/chat/completions"):
        yield Problem(field, f"{judge.base_url!r} includes the route", "End it with /v1: Plaudit adds the route")
    if parts.query or parts.fragment:
        yield Problem(field, f"{judge.base_url!r} has a query or a fragment", "Remove it")


def _http_problems(field: str, scorer: ScorerSpec) -> Iterator[Problem]:
    if scorer.http is None:
        return
    http = scorer.http
    yield from _address_problems(f"{field}.http.url", http.url, has_key=http.api_key_secret is not None)
    if urlsplit(http.url).fragment:
        yield Problem(f"{field}.http.url", f"{http.url!r} has a fragment", "Remove it")
    try:
        json_path(http.json_path or "$")
    except ValueError as error:
        yield Problem(f"{field}.http.jsonPath", str(error), "Fix it")


def _service_problems(field: str, service: ServiceSpec | None) -> Iterator[Problem]:
    if service is None:
        return
    if bool(service.name) == bool(service.url):
        yield Problem(f"{field}", "needs exactly one of name and url", "Give the name of a RewardService, or a url")
    if service.url and service.token_secret is None:
        yield Problem(f"{field}.tokenSecret", "is missing; with url it is required", "Name the token's Secret")
    if service.url:
        yield from _address_problems(f"{field}.url", service.url, has_key=service.token_secret is not None)


def _limits_problems(field: str, scorer: ScorerSpec) -> Iterator[Problem]:
    limits = scorer.limits
    if limits is None or not (scorer.judge or scorer.http):
        return
    if not (limits.requests_per_minute or limits.tokens_per_minute or limits.concurrency):
        yield Problem(
            f"{field}.limits",
            "sets no limit",
            "Give requestsPerMinute, tokensPerMinute or concurrency, or remove limits",
        )
    if limits.tokens_per_minute and scorer.http:
        yield Problem(
            f"{field}.limits.tokensPerMinute",
            "applies to kind judge only: an endpoint of kind http reports no tokens",
            "Give requestsPerMinute or concurrency",
        )
    if limits.shared is not None:
        parts = urlsplit(limits.shared.url)
        if parts.username or parts.password:
            yield Problem(
                f"{field}.limits.shared.url",
                "contains a user or a password",
                "Name the password's Secret in passwordSecret",
            )
        if limits.shared.password_secret:
            yield from password_problems(f"{field}.limits.shared.url", limits.shared.url)


def _address_problems(field: str, url: str, *, has_key: bool) -> Iterator[Problem]:
    """Yield the problems of an endpoint's URL: credentials in it, or a key that it would carry unencrypted."""
    parts = urlsplit(url)
    if parts.username or parts.password:
        yield Problem(field, "contains a user or a password", "Name the key's Secret in apiKeySecret instead")
    if has_key and parts.scheme == "http" and not is_private(parts.hostname or ""):
        yield Problem(
            field,
            f"{url!r} would carry the key of apiKeySecret unencrypted over a network",
            "Write https://; http is for loopback, private addresses, and names of the cluster or a private domain "
            "(judge, judge.models.svc, judge.internal)",
        )


def password_problems(field: str, url: str) -> Iterator[Problem]:
    """Yield a problem if the URL of a Redis would carry its password unencrypted."""
    parts = urlsplit(url)
    if parts.scheme == "redis" and not is_private(parts.hostname or ""):
        yield Problem(
            field,
            f"{url!r} would carry the password of passwordSecret unencrypted over a network",
            "Write rediss://; redis is for loopback, private addresses, and names of the cluster or a private "
            "domain (redis, redis.limits.svc, redis.internal)",
        )


def is_private(host: str) -> bool:
    """Return True for a host inside the machine, the cluster or a private network, as far as its name shows."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "." not in host or host.endswith(_PRIVATE_DOMAINS)
    return address.is_loopback or address.is_private
