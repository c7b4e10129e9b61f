"""Decide what an answer of the service means for the samples of a request. Pure."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plaudit_client.errors import AuthenticationError, InvalidSampleError, ProtocolError, RewardError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


@dataclass(frozen=True)
class Refusal:
    """A status other than 200.

    Attributes:
        errors: by position in the request; these samples are not sent again.
        pause_s: seconds to wait before the others are sent again; None: send them now.
        alone: the others must be sent one by one, because the service did not name which one it refuses.
    """

    errors: Mapping[int, RewardError] = field(default_factory=dict)
    pause_s: float | None = None
    alone: bool = False
    message: str = ""


def refusal(status: int, headers: Mapping[str, str], body: bytes, num_sent: int, num_failures: int) -> Refusal:
    """Read an answer that has no results.

    Args:
        body: ``{"error": {"type", "message", "samples": {position: message}}}``, or anything from a proxy.
        num_sent: samples or groups in the request.
        num_failures: requests in a row that have failed; sets the pause where the service gives none.
    """
    error = _error(body)
    message = error.get("message") or f"status {status}: {body[:200].decode(errors='replace')}"
    if status in (401, 403):
        return _all(num_sent, AuthenticationError(message))
    if status in (408, 425, 429) or status >= 500:
        return Refusal(pause_s=_pause_s(headers, num_failures), message=f"status {status}: {message}")
    if status in (409, 410, 413, 422):
        named = error.get("samples")
        if isinstance(named, dict) and named:
            return Refusal({int(i): InvalidSampleError(str(each)) for i, each in named.items()}, message=message)
        return _all(1, InvalidSampleError(message)) if num_sent == 1 else Refusal(alone=True, message=message)
    return _all(num_sent, ProtocolError(f"{message}. Is the URL that of a Plaudit reward service?"))


def pause_after(num_failures: int) -> float:
    """Return the seconds to wait after so many failures in a row; it doubles up to 5 s, with jitter."""
    return float(min(FIRST_PAUSE_S * 2 ** min(num_failures, 10), LONGEST_PAUSE_S) * random.uniform(0.5, 1.0))


def _all(num_sent: int, error: RewardError) -> Refusal:
    return Refusal({i: type(error)(*error.args) for i in range(num_sent)}, message=str(error))


def _error(body: bytes) -> Mapping[str, Any]:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}


def _pause_s(headers: Mapping[str, str], num_failures: int) -> float:
    try:
        return max(float(headers["retry-after"]), 0.0) * random.uniform(1.0, 1.2)
    except (KeyError, ValueError):
        return pause_after(num_failures)
