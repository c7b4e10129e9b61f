"""The name under which a request's samples are kept: that of its token, and within a token that of a run.

Runs that share a token (jobs that refer to one RewardService) name themselves in a header. Each then has ids and a
queue of its own, and none can fill the queue of another.
"""

from __future__ import annotations

import re
from collections.abc import Set

from plaudit_reward.remote.shapes.plaudit import CALLER_HEADER

MOST_NAMES = 64
"""Names within one token that have a queue of their own at a time; requests under further names share the token's."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


def token_of(caller: str) -> str:
    """Return the caller that a token belongs to; series have it as their label, because runs come and go."""
    return caller.partition("/")[0]


def caller_name(of_token: str, named: str, known: Set[str]) -> str:
    """Return the caller of a request.

    Raises:
        ValueError: the header is not a name.
    """
    if not named:
        return of_token
    if not _NAME.fullmatch(named):
        raise ValueError(f"{CALLER_HEADER}: {named[:80]!r} is not a name: use at most 63 of a-z, A-Z, 0-9, '-' and '_'")
    name = f"{of_token}/{named}"
    if name in known or sum(each.startswith(f"{of_token}/") for each in known) < MOST_NAMES:
        return name
    return of_token
