"""Recognise the callers of a gateway by their tokens, name them, and bound the samples that each may submit."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import time
from collections.abc import Callable, Set
from pathlib import Path

from plaudit_reward.endpoint.shapes import CALLER_HEADER
from plaudit_wire.errors import RefusedError
from plaudit_wire.logs import get_logger
from plaudit_workers.service.requests import RefusedRequestError

logger = get_logger(__name__)
_READ_AGAIN_S = 10.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_SHORTEST = 16


class Tokens:
    """Hold the tokens of all callers: a folder with one file for each, its name the caller's and its content the token.

    On Kubernetes the folder is a Secret's volume, whose files change when the Secret does; they are read again every
    ten seconds.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._digests = self._read()
        self._read_at = time.monotonic()
        if not self._digests:
            raise RefusedError(f"{folder} has no token: give it a file for each caller, its content the token")

    def caller(self, authorization: str) -> str | None:
        """Return the caller of a request; None for an unknown token.

        The header is ``Bearer TOKEN``, or ``Basic …`` with the token as password, for programs that take only a URL
        (``http://any:TOKEN@host``).
        """
        if time.monotonic() - self._read_at > _READ_AGAIN_S:
            self._read_at = time.monotonic()
            try:
                self._digests = self._read() or self._digests
            except (RefusedError, OSError) as error:
                logger.error("cannot use the changed tokens; keeping the earlier ones", error=str(error))
        given = _digest(_token(authorization))
        found = None
        for caller, digest in self._digests.items():  # all of them: the time must not depend on the match
            if hmac.compare_digest(given, digest):
                found = caller
        return found

    def _read(self) -> dict[str, bytes]:
        found = {}
        for file in sorted(self._folder.iterdir()) if self._folder.is_dir() else []:
            if not _NAME.fullmatch(file.name) or not file.is_file():  # Kubernetes adds ``..data`` to a volume
                continue
            token = file.read_text().strip()
            if len(token) < _SHORTEST:
                raise RefusedError(f"{file}: a token of {len(token)} characters; give it at least {_SHORTEST}")
            found[file.name] = _digest(token)
        return found


def _token(authorization: str) -> str:
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            user, _, password = base64.b64decode(value, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return ""
        return password or user
    return ""


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


MOST_NAMES = 64
"""Names within one token that have a queue of their own at a time; requests under further names share the token's."""
_CALLER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


def token_of(caller: str) -> str:
    """Return the caller that a token belongs to; series have it as their label, because runs come and go."""
    return caller.partition("/")[0]


def caller_name(of_token: str, named: str, known: Set[str]) -> str:
    """Return the caller of a request: the name of its token, and within a token that of a run.

    Runs that share a token (jobs that refer to one RewardService) name themselves in a header. Each then has ids and a
    queue of its own, and none can fill the queue of another.
    """
    if not named:
        return of_token
    if not _CALLER_NAME.fullmatch(named):
        problem = f"{CALLER_HEADER}: {named[:80]!r} is not a name: use at most 63 of a-z, A-Z, 0-9, '-' and '_'"
        raise RefusedRequestError(422, "invalid_caller", problem)
    name = f"{of_token}/{named}"
    if name in known or sum(each.startswith(f"{of_token}/") for each in known) < MOST_NAMES:
        return name
    return of_token


_BURST_S = 10.0
"""Seconds' worth of samples that a caller may submit at once after a pause."""


class SampleRate:
    """Limit each caller's samples at one gateway by a token bucket.

    A request is admitted whole while anything is left, so that it need not be smaller than the burst; what it takes too
    much must be earned before the next one.
    """

    def __init__(self, per_minute: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_minute / 60 if per_minute else None
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}
        """What each caller has left, and when that was computed."""

    def take(self, caller: str, count: int) -> float:
        """Take samples for a request; return 0, or the seconds after which it would be admitted."""
        if self._per_s is None:
            return 0.0
        now, burst = self._clock(), max(1.0, self._per_s * _BURST_S)
        left, since = self._left.get(caller, (burst, now))
        left = min(burst, left + (now - since) * self._per_s)
        admitted = left > 0
        self._left[caller] = (left - count if admitted else left, now)
        return 0.0 if admitted else max(-left / self._per_s, 1 / self._per_s)
