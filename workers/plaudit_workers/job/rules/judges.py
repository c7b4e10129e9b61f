"""Check ``spec.reward.scorers[].judge``."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from plaudit_wire.errors import ConfigurationError
from plaudit_workers.job.judge_parse import score_path, score_pattern
from plaudit_workers.job.problem import Problem
from plaudit_workers.job.rules.endpoints import address_problems
from plaudit_workers.job.spec.rewards.scorers import JudgeSpec, ScorerSpec

_OWN_MEMBERS = ("model", "messages", "stream", "n")


def judge_problems(field: str, scorer: ScorerSpec) -> Iterator[Problem]:
    """Yield every contradiction within a judge's section."""
    if scorer.judge is None:
        return
    yield from _parse(f"{field}.judge.parse", scorer.judge)
    yield from _place(f"{field}.judge", scorer.judge)
    yield from _base_url(f"{field}.judge.baseUrl", scorer.judge)
    yield from _arguments(f"{field}.judge.arguments", scorer.judge)


def _parse(field: str, judge: JudgeSpec) -> Iterator[Problem]:
    ways = [name for name, given in judge.parse.model_dump(exclude_none=True).items() if given]
    if len(ways) != 1:
        yield Problem(
            field,
            f"needs exactly one of regex, jsonPath and python, but has {' and '.join(ways) or 'none'}",
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
    yield from address_problems(field, judge.base_url, has_key=judge.api_key_secret is not None)
    parts = urlsplit(judge.base_url)
    if parts.path.rstrip("/").endswith("/chat/completions"):
        yield Problem(field, f"{judge.base_url!r} includes the route", "End it with /v1: Plaudit adds the route")
    if parts.query or parts.fragment:
        yield Problem(field, f"{judge.base_url!r} has a query or a fragment", "Remove it")


def _arguments(field: str, judge: JudgeSpec) -> Iterator[Problem]:
    for name in _OWN_MEMBERS:
        if name in judge.arguments:
            yield Problem(f"{field}.{name}", "is set by Plaudit", "Remove it; any other member may be set")
