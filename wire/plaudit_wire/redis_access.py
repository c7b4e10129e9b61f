"""Configure a run's own Redis: how it keeps its data, and the permissions of each role (the rules of its ACL user).

Roles call functions and cannot run code of their own: no EVAL, SCRIPT or FUNCTION. Only ``admin`` loads the functions.
Commands inside a function run with the rights of the caller. A role therefore gets exactly the commands and keys of its
transitions, and no other function gets it further. Most important: only the trainer writes ``state`` (incarnation,
step, announced policy), offers prompts or closes groups; only ``admin`` has FLUSHALL, CONFIG, KEYS or DEBUG.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final, NamedTuple

from plaudit_wire.names import Names

ADMIN: Final = "admin"
"""For people and for the start of Redis, which loads the functions; no process of a role has its password."""
PROBE: Final = "probe"
"""May send PING and nothing else."""


class Grant(NamedTuple):
    """Allow commands on keys. Both are separated by spaces; keys omit the run's prefix, ``*`` matches any ending."""

    keys: str
    commands: str


_CALL = "fcall time info ping"
"""Transitions; their one declared key is the prefix itself."""
_CONSUME = "xreadgroup xack xdel xclaim xpending xrange xinfo|consumers xgroup|create xgroup|delconsumer"
_GROUP = "hget hmget hset hsetnx exists"
_LEASES = "hget hset hdel"
_COUNT = Grant("counters", "hincrby")
_BEAT = (Grant("workers", "zadd zrem zrangebyscore"), Grant("workers:records", "hset hdel hmget"))
_KEEP = (Grant("group:* kept:*", "rename"), Grant("kept", "zadd zcard"))
"""Keep a service's group for its auditors."""
_CLIENT = (
    Grant("", f"{_CALL} scan"),
    Grant("service", "get"),
    Grant("samples", "exists xadd xack xdel"),
    Grant("groups", "xadd xack xdel"),
    Grant("events", "xadd"),
    Grant("group:*", f"{_GROUP} unlink"),
    *_KEEP,
    Grant("open sessions", "zadd zrem zscore zrangebyscore"),
    Grant("session:*", "hget hmget hset hdel hlen hkeys hgetall hrandfield unlink"),
    Grant("session:*", "xadd xdel xread zadd zrem zscore zrangebyscore zremrangebyrank expire"),
    Grant("in_work", "hmget hset hincrby hdel"),
    Grant("leases", "hmget hset"),
    Grant("state", "hget"),
    _COUNT,
)
GRANTS: Final[Mapping[str, tuple[Grant, ...]]] = {
    "trainer": (
        Grant("", _CALL),
        Grant("prompts samples groups ready", "xadd xack xdel xgroup|create"),
        Grant("ready", "xread xreadgroup xpending xrange"),
        Grant("group:*", f"{_GROUP} unlink"),
        Grant("open closed", "zadd zrem zscore zrange zrangebyscore zremrangebyrank"),
        Grant("sessions", "zrangebyscore"),
        Grant("leases", "hmget hset hdel"),
        Grant("state", "hget hset"),
        Grant("counters", "hget hset hdel hkeys hgetall hincrby"),
        Grant("events", "xadd xtrim"),
        *_BEAT,
    ),
    "rollout": (
        Grant("", _CALL),
        Grant("prompts", _CONSUME),
        Grant("leases", _LEASES),
        Grant("samples groups ready", "xadd xgroup|create"),
        Grant("group:*", _GROUP),
        Grant("open", "zadd zscore"),
        Grant("state", "hget"),
        Grant("events dead", "xadd"),
        _COUNT,
        *_BEAT,
    ),
    "reward": (
        Grant(" limits:*", f"{_CALL} multi exec"),  # the prefix, and budgets of judges
        Grant("samples groups", _CONSUME),
        Grant("leases", _LEASES),
        Grant("groups ready events dead session:*:results", "xadd"),
        Grant("prompts ready", "xgroup|create"),
        Grant("group:*", f"{_GROUP} unlink"),
        Grant("open", "zadd zrem"),
        Grant("session:*:groups", "hset"),
        Grant("in_work", "hincrby hdel"),
        Grant("service", "set"),
        Grant("limits:*", "hget hset hdel hgetall zadd zrem zscore zcard zrange zrangebyscore pexpire"),
        Grant("judges judges:tokens", "hincrby"),
        Grant("cache:*", "hget hset hlen expire"),
        Grant("audits", "hincrby hdel"),
        Grant("audit:*", "set get del pexpire"),
        *_KEEP,
        Grant("kept kept_batch", "zrange zrangebyscore zadd zrem"),
        Grant("kept:*", "hget hmget unlink"),
        Grant("counters", "hget hset"),
        _COUNT,
        *_BEAT,
    ),
    "model": (Grant("", _CALL), Grant("prompts samples groups ready", "xgroup|create"), Grant("state", "hget"), *_BEAT),
    "sandboxes": (
        Grant("", _CALL),
        Grant("prompts samples groups ready", "xgroup|create"),
        Grant("prompts", "xrange xinfo|groups"),
        Grant("group:*", "hmget"),
        Grant("sandboxes sandboxes:broker", "hget hmget hset hdel hlen hgetall"),
    ),
    "metrics": (
        Grant("", "time info ping"),
        Grant("events", "xreadgroup xack xgroup|create"),
        Grant("events prompts samples groups ready", "xlen xrange xpending xinfo|groups"),
        Grant("state", "hget"),
        Grant("counters judges judges:tokens", "hgetall"),
        Grant("workers", "zrangebyscore"),
        Grant("workers:records", "hmget"),
    ),
    "client": _CLIENT,
    "gateway": (
        *_CLIENT,
        Grant("session:*:results", "xrange xrevrange"),
        Grant("workers", "zrangebyscore"),
        Grant("workers:records", "hmget"),
    ),
    "keda": (Grant("", "info ping"), Grant("samples groups", "xinfo|groups xpending xlen")),
    PROBE: (Grant("", "ping"),),
}
"""Grants by user. ``client`` submits samples to a run that only scores; ``gateway`` does so for callers over HTTP.
``model`` is a server of a model that sleeps during updates, ``sandboxes`` the broker of machines."""


_REWRITTEN_FROM = "256mb"
"""Size from which the append-only file is rewritten. Most of what it holds ends within seconds, so that with Redis's
64 MB a busy run forks its Redis every second or two, and every other process waits meanwhile."""


def server_configuration(persistence: str, max_memory_bytes: int) -> tuple[str, ...]:
    """Return the lines of ``redis.conf`` that do not depend on where it runs.

    Args:
        persistence: ``always`` | ``everysec`` | ``no``, which keeps no file.
        max_memory_bytes: beyond it writes are refused; 0: no limit.
    """
    return (
        "daemonize no",
        'save ""',
        f"appendonly {'no' if persistence == 'no' else 'yes'}",
        f"appendfsync {persistence}",
        f"auto-aof-rewrite-min-size {_REWRITTEN_FROM}",
        "maxmemory-policy noeviction",
        f"maxmemory {max_memory_bytes}",
    )


def users(*, trains: bool) -> tuple[str, ...]:
    """Return the users of a run. In a run with a trainer, no other process admits groups."""
    absent = {"client", "gateway"} if trains else {"trainer", "rollout", "model", "sandboxes"}
    return (*(role for role in GRANTS if role not in absent), ADMIN)


def acl_file(run: str, passwords: Mapping[str, str]) -> str:
    """Return the contents of Redis's ``aclfile``, with digests instead of passwords; the user ``default`` is off."""
    lines = [_line(run, user, password) for user, password in passwords.items()]
    return "\n".join([_NOBODY, *lines, ""])


_NOBODY = "user default reset ~* &* +@all"
"""Disabled and without a password, so no client can use it. It keeps its permissions because Redis replays its
append-only file as this user: without them a restart would skip the file's transactions, and so every transition."""


def _line(run: str, user: str, password: str) -> str:
    digest = hashlib.sha256(password.encode()).hexdigest()
    rules = "~* &* +@all" if user == ADMIN else " ".join(_selector(run, grant) for grant in GRANTS[user])
    return f"user {user} reset on #{digest} {rules}"


def _selector(run: str, grant: Grant) -> str:
    """Return a user's rules. Each grant is a separate selector; one that allows a command with its keys suffices."""
    keys = " ".join(f"~{Names(run).prefix}{key}" for key in grant.keys.split(" "))
    return f"({keys} {' '.join(f'+{command}' for command in grant.commands.split())})"
