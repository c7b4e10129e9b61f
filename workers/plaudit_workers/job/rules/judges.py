"""Check ``spec.reward.scorers[].judge`` and its limits."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from urllib.parse import urlsplit

from plaudit_reward.errors import ConfigurationError
from plaudit_reward.judge.parse import JsonParser, RegexParser
from plaudit_reward.judge.prompt import PromptTemplate
from plaudit_workers.job.problem import Problem
from plaudit_workers.job.spec.scorers import JudgeSpec, LimitsSpec, ScorerSpec

_PRIVATE_DOMAINS = (".svc", ".local", ".localhost", ".internal", ".lan", ".home.arpa")
_OWN_MEMBERS = ("model", "messages", "stream", "n")


def judge_problems(field: str, scorer: ScorerSpec) -> Iterator[Problem]:
    """Yield every contradiction within a judge's section."""
    if scorer.judge is None:
        return
    yield from _parse(f"{field}.judge.parse", scorer.judge)
    yield from _base_url(f"{field}.judge.baseUrl", scorer.judge)
    yield from _arguments(f"{field}.judge.arguments", scorer.judge)
    if scorer.limits is not None:
        yield from _limits(f"{field}.limits", scorer.limits)


def template_problem(field: str, path: str, *, group: bool) -> Problem | None:
    """Return the problem of a prompt template on disk, or None."""
    try:
        PromptTemplate(path, group=group)
    except ConfigurationError as error:
        return Problem(field, str(error), "Fix the template. Its path is relative to the job file")
    return None


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
            RegexParser(judge.parse.regex)
        elif judge.parse.json_path:
            JsonParser(judge.parse.json_path)
    except ConfigurationError as error:
        yield Problem(f"{field}.{ways[0]}", str(error), "Fix it")


def _base_url(field: str, judge: JudgeSpec) -> Iterator[Problem]:
    parts = urlsplit(judge.base_url)
    if parts.username or parts.password:
        yield Problem(field, "contains a user or a password", "Name the key's Secret in apiKeySecret instead")
    if parts.path.rstrip("/").endswith("/chat/completions"):
        yield Problem(field, f"{judge.base_url!r} includes the route", "End it with /v1: Plaudit adds the route")
    if judge.api_key_secret and parts.scheme == "http" and not is_private(parts.hostname or ""):
        yield Problem(
            field,
            f"{judge.base_url!r} would carry the key of apiKeySecret unencrypted over a network",
            "Write https://; http is for loopback, private addresses, and names of the cluster or a private domain "
            "(judge, judge.models.svc, judge.internal)",
        )
    if parts.query or parts.fragment:
        yield Problem(field, f"{judge.base_url!r} has a query or a fragment", "Remove it")


def is_private(host: str) -> bool:
    """Return True for a host inside the machine, the cluster or a private network, as far as its name shows."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "." not in host or host.endswith(_PRIVATE_DOMAINS)
    return address.is_loopback or address.is_private


def _arguments(field: str, judge: JudgeSpec) -> Iterator[Problem]:
    for name in _OWN_MEMBERS:
        if name in judge.arguments:
            yield Problem(
                f"{field}.{name}", "is set by Plaudit", "Remove it; every other member of the request is free"
            )


def _limits(field: str, limits: LimitsSpec) -> Iterator[Problem]:
    if not (limits.requests_per_minute or limits.tokens_per_minute or limits.concurrency):
        yield Problem(
            field, "sets no limit", "Give requestsPerMinute, tokensPerMinute or concurrency, or remove limits"
        )
    if limits.shared is not None:
        parts = urlsplit(limits.shared.url)
        if parts.username or parts.password:
            yield Problem(
                f"{field}.shared.url", "contains a user or a password", "Name the password's Secret in passwordSecret"
            )
