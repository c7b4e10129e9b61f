"""Distinguish a broken sample from a broken service by the exception that a user's function raised.

Client libraries are recognised by the names of their exception classes, so none of them must be installed.
"""

from __future__ import annotations

import traceback
from typing import Any

from plaudit_reward.score import Score
from plaudit_wire.errors import InfrastructureError, ScoreTimeoutError

_INFRASTRUCTURE = frozenset(
    {
        "requests.exceptions.ConnectionError",
        "requests.exceptions.Timeout",
        "urllib3.exceptions.HTTPError",
        "httpx.TransportError",
        "aiohttp.client_exceptions.ClientConnectionError",
        "aiohttp.client_exceptions.ServerTimeoutError",
        "openai.APIConnectionError",
        "openai.RateLimitError",
        "openai.InternalServerError",
        "anthropic.APIConnectionError",
        "anthropic.RateLimitError",
        "anthropic.InternalServerError",
        "redis.exceptions.ConnectionError",
        "socket.gaierror",
        "urllib.error.URLError",
    }
)
_BUILT_IN_INFRASTRUCTURE = (InfrastructureError, ConnectionError, TimeoutError, MemoryError)
_RETRIABLE_STATUS = frozenset({408, 425, 429})
_MAX_REASON_CHARACTERS = 500


def is_infrastructure(error: BaseException) -> bool:
    """Return True if a service that the function called failed, False if the sample did."""
    if isinstance(error, _BUILT_IN_INFRASTRUCTURE):
        return True
    status = _status(error)
    if status is not None:
        return status >= 500 or status in _RETRIABLE_STATUS
    return any(_qualified(base) in _INFRASTRUCTURE for base in type(error).__mro__)


def failed_score(error: BaseException, path: str) -> Score:
    """Return the score of a call that raised; the reason names the line in the user's file ``path``."""
    reason = f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARACTERS] + _place(error, path)
    if isinstance(error, ScoreTimeoutError):
        return Score.failed("timeout", reason)
    return Score.failed("infra_error" if is_infrastructure(error) else "data_error", reason)


def _place(error: BaseException, path: str) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f" ({path}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""


def _status(error: Any) -> int | None:
    for holder in (error, getattr(error, "response", None)):
        for field in ("status_code", "status", "code"):
            status = getattr(holder, field, None)
            if isinstance(status, int) and 400 <= status < 600:
                return status
    return None


def _qualified(kind: type) -> str:
    # httpx and openai show their classes under the package's own name, whatever file defines them.
    package = kind.__module__.split(".", 1)[0]
    name = f"{kind.__module__}.{kind.__name__}"
    return name if name in _INFRASTRUCTURE else f"{package}.{kind.__name__}"
