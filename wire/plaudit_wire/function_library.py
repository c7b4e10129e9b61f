"""Build libraries of Redis Functions: the code that changes several keys of Redis at once.

A library's name and the names of its functions hold a digest of its code. Versions of the code live side by side in one
Redis, as during an upgrade, and a caller never runs another version than its own. Redis keeps libraries in its
append-only file, on its replicas and through FLUSHALL. In a run's own Redis only ``admin`` may load one; the users of
the roles may only call functions, so that no process can run code of its own there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

from redis.exceptions import NoPermissionError, ResponseError

from plaudit_wire.outage import PassingRefusalError

NEEDED_PERMISSIONS: Final = "+fcall +function|load"
"""ACL rules that a user needs to load and call libraries."""

_DIGEST_DIGITS = 12
_HEADER = "#!lua"


class LibraryMissingError(PassingRefusalError):
    """Redis lacks a library of functions, and this user may not load it. It passes: an admin may load it."""


class FunctionLibrary:
    """Hold the text of a library and the names of its functions.

    Args:
        bodies: by function, its Lua code. The first line is ``#!lua``, with ``flags=…`` if it has any; the code refers
            to ``KEYS`` and ``ARGV``.
        shared: Lua code in front of the functions; Redis executes it once, when it loads the library.
        begin: Lua code with which every function begins.
    """

    def __init__(self, family: str, bodies: Mapping[str, str], *, shared: str = "", begin: str = "") -> None:
        digest = hashlib.sha256(repr((shared, begin, sorted(bodies.items()))).encode()).hexdigest()[:_DIGEST_DIGITS]
        self.name: Final = f"{family}_{digest}"
        self.functions: Final[Mapping[str, str]] = {name: f"{self.name}_{name}" for name in bodies}
        functions = "".join(_registered(self.functions[name], body, begin) for name, body in bodies.items())
        self.text: Final = f"{_HEADER} name={self.name}\n{shared}\n{functions}"


def _registered(function: str, body: str, begin: str) -> str:
    header, _, code = body.partition("\n")
    if not header.startswith(_HEADER):
        raise ValueError(f"function {function} begins with {header!r} instead of {_HEADER}")
    given = header.removeprefix(_HEADER).strip().removeprefix("flags=")
    flags = ", ".join(f"'{flag}'" for flag in given.split(",") if flag)
    return (
        f"redis.register_function{{function_name='{function}', flags={{{flags}}}, callback=function(KEYS, ARGV)\n"
        f"{begin}\n{code}end}}\n"
    )


def is_missing(error: object) -> bool:
    """Return True for Redis's answer to a call of a function that no loaded library has."""
    return isinstance(error, ResponseError) and str(error).endswith("Function not found")


def missing_error(library: FunctionLibrary, load_error: object) -> LibraryMissingError:
    """Return the error for a library that is still missing after an attempt to load it, which ``load_error`` ended."""
    if isinstance(load_error, NoPermissionError):
        reason = f"this user may not load it (that takes {NEEDED_PERMISSIONS})"
    else:
        reason = str(load_error)
    return LibraryMissingError(f"Redis lacks the functions {library.name}, and {reason}")
