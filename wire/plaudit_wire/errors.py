"""Errors that several parts of Plaudit raise and catch.

The tree of scoring; the type decides whether a retry is useful::

    ScoringError
    ├── ConfigurationError     the job is invalid: refused before anything runs (file, function, argument, remedy)
    ├── DataError              this sample cannot be scored; never retried
    ├── InfrastructureError    the service that scores is broken or unreachable; retried within the sample's budget
    │   ├── WorkerKilledError  the process that ran the scorer died
    │   └── BusyError          the service works and asks for fewer requests (status 429)
    └── ScoreTimeoutError      the time limit passed; the call was stopped
        └── CallTimeoutError   a service did not answer one call in time; retried

A process of a job ends itself with ``RefusedError``, ``JobFailedError`` or ``StoppedError``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from plaudit_wire.printable import printable

EXIT_INTERRUPTED = 130
"""The exit code that shells use for a program that Ctrl-C ended; a run with it was stopped, and has not failed."""
_SHOWN_CHARACTERS = 300
_TWO_STOPS = re.compile(r"(?<=[\w)\]}'\"`>])\.\.(?=\s|$)")


class _Message(Exception):  # noqa: N818 (the errors below are named)
    """An error for people: where another error's text ends within a sentence, one full stop is left."""

    def __str__(self) -> str:
        return _TWO_STOPS.sub(".", super().__str__())


class ScoringError(_Message):
    """The base of errors while a reward is set up or computed."""


class ConfigurationError(ScoringError):
    """The scorer cannot be built as configured. The message names the file or field, the value and the remedy."""


class DataError(ScoringError):
    """This sample cannot be scored (bad ground truth, the reward function raised on it). Never retried."""


class InfrastructureError(ScoringError):
    """The service that computes the score is unreachable or broken. Retried with backoff within the sample's budget.

    ``retry_after_s``: seconds that the service asked to wait (Retry-After).
    """

    def __init__(self, message: str = "", *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class WorkerKilledError(InfrastructureError):
    """The process that ran the scorer died (out of memory, killed)."""


class BusyError(InfrastructureError):
    """The service works, and has too many requests: status 429, or 503 with Retry-After."""


class ScoreTimeoutError(ScoringError):
    """The scorer did not answer within its time limit; its process was stopped."""


class CallTimeoutError(ScoreTimeoutError):
    """A service did not answer one call within its time limit. Retried like an infrastructure failure."""


class RefusedError(_Message):
    """The job or its environment is wrong, and a restart would not help. The message names the remedy."""


class JobFailedError(_Message):
    """The job ran and failed for good (too many failed scores, restarts used up)."""


class StoppedError(Exception):
    """The process was stopped before it began its work."""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, then the error that caused it or was being handled, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def described(error: BaseException) -> str:
    """Return the type and the first line of an error of other people's code, for a message."""
    try:
        text = str(error).strip()
    except Exception:  # the error's own code
        text = ""
    first = printable(next(iter(text.splitlines()), ""))[:_SHOWN_CHARACTERS]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
