"""Define the ways in which a request gets no response. Each message begins with the server's address.

::

    InfrastructureError
    └── NoResponseError           no whole response
        ├── UnreachableError         no connection: DNS, refused, TLS, a proxy; the server never saw the request
        ├── ConnectionLostError      the connection ended, or carried something other than HTTP
        └── ResponseTooLargeError    the body passed the limit

    CallTimeoutError              no whole response within the time limit
"""

from __future__ import annotations

from plaudit_wire.errors import InfrastructureError


class NoResponseError(InfrastructureError):
    """No whole response arrived."""


class UnreachableError(NoResponseError):
    """No connection could be opened."""


class ConnectionLostError(NoResponseError):
    """An open connection ended before the whole response, or the response was not HTTP."""


class ResponseTooLargeError(NoResponseError):
    """The response's body is larger than the caller accepts."""
