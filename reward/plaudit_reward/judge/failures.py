"""What an endpoint's refusals mean: try again, leave it alone, or give this sample up.

::

    InfrastructureError
    ├── BusyError               429, or 503 with Retry-After: it is there, and has enough to do
    ├── EndpointRefusedError    401, 403, 404, 405, a redirect: the endpoint's address, key or model is wrong
    └── CircuitOpenError        it was not asked: it failed too often
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from plaudit_reward.errors import DataError, InfrastructureError, RewardError

_REFUSALS = frozenset({401, 403, 404, 405, 407})
_PASSING = frozenset({408, 409, 425})
_LONGEST_RETRY_AFTER_S = 3600.0
_REMEDY = {
    401: "check apiKeySecret",
    403: "check apiKeySecret and what the key may do",
    404: "check baseUrl (up to and with /v1) and model",
}


class BusyError(InfrastructureError):
    """The endpoint wants fewer requests."""


class EndpointRefusedError(InfrastructureError):
    """The endpoint refuses every request as configured; no sample is to blame."""


class CircuitOpenError(InfrastructureError):
    """The endpoint was not asked."""


def failure_of(status: int, headers: Mapping[str, str], message: str) -> RewardError:
    """The error that stands for a response other than 200.

    Args:
        status: HTTP status.
        headers: of the response, lower case names.
        message: what the endpoint said.
    """
    words = f"the endpoint answered {status}: {message}" if message else f"the endpoint answered {status}"
    wait_s = retry_after_s(headers)
    if status == 429 or (status == 503 and wait_s is not None):
        return BusyError(words, retry_after_s=wait_s)
    if status in _REFUSALS or status < 400:
        remedy = _REMEDY.get(status, "check baseUrl")
        return EndpointRefusedError(f"{words} ({remedy})", retry_after_s=wait_s)
    if status >= 500 or status in _PASSING:
        return InfrastructureError(words, retry_after_s=wait_s)
    return DataError(words)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that ``Retry-After`` asks for, given as such or as a date; None when it says nothing sensible.

    A date is read against the response's own ``Date``, so that a wrong clock here or there does no harm.
    """
    text = headers.get("retry-after", "").strip()
    try:
        return _bounded(float(text))
    except ValueError:
        pass
    try:
        until = parsedate_to_datetime(text).timestamp()
    except ValueError:
        return None
    try:
        now = parsedate_to_datetime(headers.get("date", "")).timestamp()
    except ValueError:
        now = time.time()
    return _bounded(until - now)


def _bounded(seconds: float) -> float | None:
    return min(max(0.0, seconds), _LONGEST_RETRY_AFTER_S) if seconds == seconds else None
