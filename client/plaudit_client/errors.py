"""The errors of the client.

::

    RewardError
    ├── InvalidSampleError     the service refuses the sample: correct it; the message names the field
    ├── AuthenticationError    the service refuses the token
    ├── UnavailableError       no result within timeout_s; the same id gets it later
    ├── ProtocolError          the URL answers, but not as a Plaudit service
    └── NoScoreError           the sample ended without a score; raised by ``Result.require_score`` only
"""

from __future__ import annotations


class RewardError(Exception):
    """The base class of the client's errors."""


class InvalidSampleError(RewardError):
    """The service refuses the sample, or its id belongs to another one. Sending it again does not help."""


class AuthenticationError(RewardError):
    """The service refuses the token."""


class UnavailableError(RewardError):
    """The service gave no result within ``timeout_s``. Nothing is lost: the same sample under the same id gets it."""


class ProtocolError(RewardError):
    """The URL answers, but not as a Plaudit service of this version."""


class NoScoreError(RewardError):
    """The sample ended without a score. Leave it out of means and losses: it is not a zero."""
