"""The response has a form that the job gives as a regular expression, such as ``<think>.*</think>.*``."""

from __future__ import annotations

import re
from typing import Literal

from plaudit_reward.errors import ConfigurationError
from plaudit_wire.sample import Sample


def matches_format(sample: Sample, *, pattern: str, match: Literal["full", "start", "anywhere"] = "full") -> float:
    """1.0 when the response matches, else 0.0.

    Args:
        sample: of which only the response counts.
        pattern: in Python's syntax; ``.`` matches line ends too.
        match: whether the whole response, its beginning or any part of it must match.
    """
    expression = re.compile(pattern, re.DOTALL)
    methods = {"full": expression.fullmatch, "start": expression.match, "anywhere": expression.search}
    return 1.0 if methods[match](sample.response) else 0.0


def check_format(*, pattern: str, match: str = "full") -> None:
    """Refuses a pattern that is no regular expression.

    Raises:
        ConfigurationError: it is none.
    """
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigurationError(
            f"pattern {pattern!r} is no regular expression: {error}. Mend it; in YAML, put it in single quotes"
        ) from error
