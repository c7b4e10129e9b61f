"""Parse a judge's answer into numbers: by a regular expression, a path into JSON, or the user's function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from plaudit_reward.functions.result import to_score, to_scores
from plaudit_reward.isolation.function_scorer import FunctionScorer
from plaudit_reward.score import Score
from plaudit_reward.scorer import Attempt
from plaudit_wire.errors import DataError
from plaudit_wire.sample import Sample
from plaudit_workers.job.json_path import find_json, value_at
from plaudit_workers.job.judge_parse import score_path, score_pattern

_MATCH_WITHIN_S = 1.0
_EXCERPT_CHARACTERS = 200


class Parser(Protocol):
    """Read one answer."""

    async def open(self) -> None:
        """Start child processes where needed. Raises ``ConfigurationError``."""
        ...

    async def scores(self, answer: str, samples: Sequence[Sample], attempt: Attempt) -> list[Score]:
        """Return one score for each sample that the answer is about; raise ``DataError`` if it has no value."""
        ...

    async def close(self) -> None:
        """End the child processes."""
        ...


class RegexParser:
    """Take the first group of the first match; for a group of samples of every match, one for each sample.

    Raises:
        ConfigurationError: the pattern does not compile, or has no group.
    """

    def __init__(self, pattern: str, *, group: bool = False) -> None:
        self._pattern = score_pattern(pattern)
        self._group = group

    async def open(self) -> None:
        """Do nothing: there are no child processes."""

    async def scores(self, answer: str, samples: Sequence[Sample], attempt: Attempt) -> list[Score]:
        """See ``Parser``."""
        try:
            if self._group:
                found = [match.group(1) for match in self._pattern.finditer(answer, timeout=_MATCH_WITHIN_S)]
                return _many([_number(text, answer) for text in found], len(samples), answer)
            match = self._pattern.search(answer, timeout=_MATCH_WITHIN_S)
        except TimeoutError:
            raise DataError(f"the regular expression takes too long on {_excerpt(answer)}") from None
        if match is None or match.group(1) is None:
            raise DataError(f"the regular expression matches nothing in {_excerpt(answer)}")
        return [to_score(_number(match.group(1), answer))]

    async def close(self) -> None:
        """Do nothing: there are no child processes."""


class JsonParser:
    """Take the value at a path of the answer's first JSON; for a group a list with one value for each sample.

    Raises:
        ConfigurationError: the path cannot be parsed.
    """

    def __init__(self, path: str, *, group: bool = False) -> None:
        self._steps = score_path(path)
        self._path = path
        self._group = group

    async def open(self) -> None:
        """Do nothing: there are no child processes."""

    async def scores(self, answer: str, samples: Sequence[Sample], attempt: Attempt) -> list[Score]:
        """See ``Parser``."""
        try:
            value = value_at(find_json(answer), self._steps)
        except (LookupError, RecursionError) as error:
            raise DataError(f"{self._path} finds nothing: {error.args[0]}: {_excerpt(answer)}") from error
        if not self._group:
            return [to_score(_number(value, answer))]
        values = [_number(item, answer) for item in value] if isinstance(value, list) else value
        return _many(values, len(samples), answer)

    async def close(self) -> None:
        """Do nothing: there are no child processes."""


class FunctionParser:
    """Call a function ``(answer)`` or ``(answer, sample)``; for a group ``(answer, samples)`` with one value for each.

    Args:
        function: of scope ``answer`` or ``answers``; opened and closed here.
    """

    def __init__(self, function: FunctionScorer) -> None:
        self._function = function

    async def open(self) -> None:
        """Start the child processes."""
        await self._function.open()

    async def scores(self, answer: str, samples: Sequence[Sample], attempt: Attempt) -> list[Score]:
        """See ``Parser``."""
        return await self._function.parse(answer, samples, attempt)

    async def close(self) -> None:
        """End the child processes."""
        await self._function.close()


def _number(value: Any, answer: str) -> float:
    """Return a number, also from text (``"4"``); true and false are 1 and 0."""
    if isinstance(value, int | float | str):
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    raise DataError(f"{value!r} is not a number, in {_excerpt(answer)}"[:500])


def _many(values: Any, count: int, answer: str) -> list[Score]:
    if not isinstance(values, list):
        raise DataError(f"{type(values).__name__} instead of a list of {count} values, in {_excerpt(answer)}")
    if len(values) != count:
        raise DataError(f"{len(values)} values for {count} responses, in {_excerpt(answer)}")
    return to_scores(values, count)


def _excerpt(answer: str) -> str:
    text = " ".join(answer.split())
    return repr(text if len(text) <= _EXCERPT_CHARACTERS else text[:_EXCERPT_CHARACTERS] + "…")
