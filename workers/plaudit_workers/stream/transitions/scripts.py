"""The transitions: the texts that Redis runs, and what a call of one is.

Each ``lua/<name>.lua`` is one transition; what they share (``lua/shared``) is put before each.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import NamedTuple

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

OUTAGE = (RedisConnectionError, RedisTimeoutError, OSError)
"""What a Redis that is away raises."""

_SHARED = ("run", "session", "group")
_names = itertools.count()
_boot = os.urandom(6).hex()

Argument = str | bytes | int | float


def new_call() -> str:
    """A token that no other call has: Redis tells a repeated call from a second one by it."""
    return f"{_boot}{os.getpid():x}.{next(_names):x}"


class Call(NamedTuple):
    """One transition and its ARGV."""

    script: str
    arguments: Sequence[Argument]


class Scripts:
    """The texts of the transitions.

    Args:
        overrides: other texts for some of them, by file name without ending (``shared/group`` included); the tests of
            the tests seed bugs with it.
    """

    def __init__(self, overrides: Mapping[str, str] | None = None) -> None:
        folder = files("plaudit_workers.stream.transitions") / "lua"
        read = {entry.name[:-4]: entry.read_text() for entry in folder.iterdir() if entry.name.endswith(".lua")}
        read |= {f"shared/{name}": (folder / "shared" / f"{name}.lua").read_text() for name in _SHARED}
        self.files: dict[str, str] = read | dict(overrides or {})
        shared = "".join(self.files[f"shared/{name}"] for name in _SHARED)
        self.texts: dict[str, str] = {}
        self.digests: dict[str, str] = {}
        for name in read:
            if not name.startswith("shared/"):
                flags, _, body = self.files[name].partition("\n")
                self.texts[name] = f"{flags}\n{shared}{body}"
                self.digests[name] = hashlib.sha1(self.texts[name].encode()).hexdigest()  # noqa: S324 - Redis's own name
