"""Errors of the API server, by whether a retry helps.

KubeError                  any response but success
├── NotFoundError          404: the object is missing
├── AlreadyExistsError     409 on create: another object has this name
├── ConflictError          409 otherwise: the object changed or was replaced
├── GoneError              410: the server no longer has the version of the watch; list again
├── InvalidError           400, 403, 422: a retry fails in the same way
└── UnavailableError       429, 5xx, no response: retry later
"""

from __future__ import annotations


class KubeError(Exception):
    """The API server did not report success.

    Attributes:
        status: HTTP status; 0 without a response.
        retry_after_s: seconds that the server asks to wait; 0 if it does not.
    """

    def __init__(self, message: str, status: int = 0, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class NotFoundError(KubeError):
    """The object, or its kind, is missing."""


class AlreadyExistsError(KubeError):
    """An object with this name exists."""


class ConflictError(KubeError):
    """A precondition (uid, resourceVersion) did not hold."""


class GoneError(KubeError):
    """The resourceVersion of a watch is too old."""


class InvalidError(KubeError):
    """The server rejects the request for its content or its sender."""


class ApiUnavailableError(KubeError):
    """The API server is overloaded, broken or unreachable."""


_TOO_LARGE = "Too large resource version"
"""The 504 of a server that was restored from a backup, for a version newer than its own."""


def error_of(status: int, message: str, reason: str = "", retry_after_s: float = 0.0) -> KubeError:
    """Return the error for an HTTP status and the ``reason`` of a Status object."""
    kind: type[KubeError] = InvalidError
    if status == 404:
        kind = NotFoundError
    elif status == 409:
        kind = AlreadyExistsError if reason == "AlreadyExists" else ConflictError
    elif status == 410 or _TOO_LARGE in message:
        kind = GoneError
    elif status == 429 or status >= 500:
        kind = ApiUnavailableError
    return kind(message, status, retry_after_s)
