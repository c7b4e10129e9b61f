"""Map an endpoint's refusals to errors: retry, stop asking, or give this sample up.

::

    InfrastructureError
    ├── BusyError               429, or 503 with Retry-After: the endpoint works and has too many requests
    ├── EndpointRefusedError    401, 403, 404, 405, 407, a redirect: its address, key or model is wrong
    └── CircuitOpenError        no request was sent: too many had failed
"""

from __future__ import annotations

from collections.abc import Mapping

from plaudit_reward.http.response import retry_after_s
from plaudit_wire.errors import DataError, InfrastructureError, ScoringError

_REFUSALS = frozenset({401, 403, 404, 405, 407})
_TRANSIENT = frozenset({408, 409, 425})


class BusyError(InfrastructureError):
    """The endpoint asks for fewer requests."""


class EndpointRefusedError(InfrastructureError):
    """The endpoint refuses every request as configured; no sample is to blame."""


class CircuitOpenError(InfrastructureError):
    """No request was sent."""


def failure_of(
    url: str, status: int, headers: Mapping[str, str], message: str, remedies: Mapping[int, str]
) -> ScoringError:
    """Return the error for a response other than 200.

    Args:
        headers: of the response; names in lower case, or a mapping that ignores case.
        remedies: what to do about a status that refuses every request.
    """
    text = f"{url} responded {status}: {message}" if message else f"{url} responded {status}"
    wait_s = retry_after_s(headers)
    if status == 429 or (status == 503 and wait_s is not None):
        return BusyError(text, retry_after_s=wait_s)
    if status in _REFUSALS or status < 400:
        remedy = remedies.get(status, "check the address")
        return EndpointRefusedError(f"{text} ({remedy})", retry_after_s=wait_s)
    if status >= 500 or status in _TRANSIENT:
        return InfrastructureError(text, retry_after_s=wait_s)
    return DataError(text)
