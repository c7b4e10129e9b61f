"""What can go wrong between the operator and the API server, and whether asking again helps.

KubeError                  any answer but success
├── NotFoundError          404: the object is gone
├── AlreadyExistsError     409 on create: somebody's object has that name
├── ConflictError          409 otherwise: the object changed, or is another one of that name
├── GoneError              410: the watch's place in history is forgotten, list again
├── InvalidError           400, 403, 422: asking again says the same
└── UnavailableError       429, 5xx, no answer: ask again later
"""

from __future__ import annotations


class KubeError(Exception):
    """An answer of the API server that is no success.

    Attributes:
        status: HTTP status; 0 when there was no answer.
        retry_after_s: how long the server asks to wait; 0 when it does not say.
    """

    def __init__(self, message: str, status: int = 0, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class NotFoundError(KubeError):
    """The object, or its kind, is not there."""


class AlreadyExistsError(KubeError):
    """An object of that name is there already."""


class ConflictError(KubeError):
    """A precondition (uid, resourceVersion) did not hold."""


class GoneError(KubeError):
    """The resourceVersion of a watch is too old."""


class InvalidError(KubeError):
    """The request is refused for what it says, or for who sends it."""


class UnavailableError(KubeError):
    """The API server is overloaded, broken or out of reach."""


def error_of(status: int, message: str, reason: str = "", retry_after_s: float = 0.0) -> KubeError:
    """The error that an HTTP status and the ``reason`` of a Status object stand for."""
    kind: type[KubeError] = InvalidError
    if status == 404:
        kind = NotFoundError
    elif status == 409:
        kind = AlreadyExistsError if reason == "AlreadyExists" else ConflictError
    elif status == 410:
        kind = GoneError
    elif status == 429 or status >= 500:
        kind = UnavailableError
    return kind(message, status, retry_after_s)
