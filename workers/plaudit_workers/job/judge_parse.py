"""Check how a judge's answer is parsed: ``judge.parse.regex`` and ``judge.parse.jsonPath``."""

from __future__ import annotations

from typing import Any

import regex  # type: ignore[import-untyped]

from plaudit_wire.errors import ConfigurationError
from plaudit_workers.job.json_path import Step, json_path


def score_pattern(pattern: str) -> Any:
    """Return the compiled expression, whose first group is the score.

    Args:
        pattern: Python's syntax.

    Raises:
        ConfigurationError: the pattern does not compile, or has no group.
    """
    try:
        compiled = regex.compile(pattern)
    except regex.error as error:
        raise ConfigurationError(f"judge.parse.regex {pattern!r} does not compile: {error}") from error
    if compiled.groups < 1:
        raise ConfigurationError(
            f"judge.parse.regex {pattern!r} has no group: put the number in parentheses, like 'score: ([0-9.]+)'"
        )
    return compiled


def score_path(path: str) -> list[Step]:
    """Return the steps to the score in a JSON answer.

    Raises:
        ConfigurationError: the path cannot be parsed.
    """
    try:
        return json_path(path)
    except ValueError as error:
        raise ConfigurationError(f"judge.parse.jsonPath {error}") from error
