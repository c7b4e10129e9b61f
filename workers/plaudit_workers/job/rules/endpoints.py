"""Check the endpoints that scorers call: addresses, ``spec.reward.scorers[].http`` and limits."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from urllib.parse import urlsplit

from plaudit_workers.job.json_path import json_path
from plaudit_workers.job.problem import Problem
from plaudit_workers.job.spec.rewards.scorers import ScorerSpec, ServiceSpec

_PRIVATE_DOMAINS = (".svc", ".local", ".localhost", ".internal", ".lan", ".home.arpa")


def http_problems(field: str, scorer: ScorerSpec) -> Iterator[Problem]:
    """Yield every contradiction within the section ``http``."""
    if scorer.http is None:
        return
    http = scorer.http
    yield from address_problems(f"{field}.http.url", http.url, has_key=http.api_key_secret is not None)
    if urlsplit(http.url).fragment:
        yield Problem(f"{field}.http.url", f"{http.url!r} has a fragment", "Remove it")
    try:
        json_path(http.json_path or "$")
    except ValueError as error:
        yield Problem(f"{field}.http.jsonPath", str(error), "Fix it")


def service_problems(field: str, service: ServiceSpec | None) -> Iterator[Problem]:
    """Yield every contradiction within a section ``service``."""
    if service is None:
        return
    if bool(service.name) == bool(service.url):
        yield Problem(f"{field}", "needs exactly one of name and url", "Give the name of a RewardService, or a url")
    if service.url and service.token_secret is None:
        yield Problem(f"{field}.tokenSecret", "is missing; with url it is required", "Name the token's Secret")
    if service.url:
        yield from address_problems(f"{field}.url", service.url, has_key=service.token_secret is not None)


def address_problems(field: str, url: str, *, has_key: bool) -> Iterator[Problem]:
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


def cache_problems(field: str, scorer: ScorerSpec) -> Iterator[Problem]:
    """Yield a problem if scores are to be kept that depend on the other samples of their group."""
    if scorer.cache is not None and scorer.scope == "group":
        yield Problem(f"{field}.cache", "applies to scope sample only", "Remove it, or set scope to sample")


def limits_problems(field: str, scorer: ScorerSpec) -> Iterator[Problem]:
    """Yield every contradiction within a scorer's limits."""
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
