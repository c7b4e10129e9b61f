"""Define the interface of a shape: the request that an endpoint expects, and the reading of its answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from plaudit_reward.functions.result import extra_of
from plaudit_reward.score import Score
from plaudit_wire.errors import DataError, InfrastructureError
from plaudit_wire.sample import Sample


@dataclass(frozen=True)
class EndpointShape:
    """One protocol of reward endpoints."""

    body: Callable[[Sample], dict[str, Any]]
    """Returns the request's JSON object."""
    score: Callable[[Any], Score]
    """Reads the answer's JSON. Raises ``MalformedAnswerError`` and ``DataError``."""
    seed_url: Callable[[str], str] = lambda url: ""
    """Returns the URL that opens a sample's session before it is scored; empty: the endpoint has no sessions."""
    unseeded: frozenset[str] = frozenset()
    """Members of the request that the opening of a session does not get."""


class MalformedAnswerError(InfrastructureError):
    """The answer does not have the shape that the job names: something else answers at this address."""


def member(answer: Any, name: str) -> Any:
    """Return a member of the answer; raise ``MalformedAnswerError`` if it is not an object with this member."""
    if not isinstance(answer, dict):
        raise MalformedAnswerError(f"the answer is {type(answer).__name__}, not an object with {name!r}")
    if name not in answer:
        raise MalformedAnswerError(f"the answer has no {name!r} (its members: {', '.join(answer) or 'none'})"[:300])
    return answer[name]


def scored(value: Any, extra: Mapping[str, Any] | None = None) -> Score:
    """Return the score of a value: a finite number.

    Raises:
        DataError: the value is null, text or not finite. The endpoint answered, and has no score for this sample.
    """
    if value is None:
        raise DataError("the endpoint has no score for this sample: its answer is null")
    if isinstance(value, str) or not isinstance(value, int | float):
        raise DataError(f"the endpoint's score is {str(value)[:100]!r}, which is not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise DataError(f"the endpoint's score {number} is not finite")
    return Score("scored", number, extra=extra_of(extra or {}))


def others(answer: Mapping[str, Any], *used: str) -> dict[str, Any]:
    """Return the numbers and texts of an answer besides the members ``used``."""
    return {name: item for name, item in answer.items() if name not in used and isinstance(item, int | float | str)}
