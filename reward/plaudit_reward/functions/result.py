"""Convert the return value of a user's function into typed scores; a failure never becomes a number."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from plaudit_reward.score import Score

_MAX_TEXT_CHARACTERS = 2_000
"""Longer texts in ``extra`` are cut, because every score carries them."""

_EXPECTED = "return a number, None, a dict with 'score', a (score, request_text, explanation) tuple, or a Score"


def to_score(value: Any) -> Score:
    """Return the score of one returned value.

    ``None`` is ``skipped``; NaN, infinities and anything that is not a number are a ``data_error``.
    """
    if isinstance(value, Score):
        return _checked(value)
    if isinstance(value, Mapping):
        return _from_mapping(value)
    if isinstance(value, tuple):
        return _from_tuple(value)
    return _from_number(value, {})


def to_scores(values: Any, count: int) -> list[Score]:
    """Return the scores of a group's list; a ``data_error`` for each sample if it is not a list of ``count`` values."""
    if not isinstance(values, str | Mapping) and hasattr(values, "__len__") and hasattr(values, "__iter__"):
        if len(values) == count:
            return [to_score(value) for value in values]
        reason = f"returned {len(values)} scores for {count} samples"
    else:
        reason = f"returned {type(values).__name__} instead of a list of {count} scores"
    return [Score.failed("data_error", reason)] * count


def _checked(score: Score) -> Score:
    number = _from_number(score.value, extra_of(score.extra))
    if score.outcome == "scored":
        return number
    return Score(score.outcome, reason=str(score.reason), extra=number.extra)


def _from_mapping(value: Mapping[Any, Any]) -> Score:
    if "score" not in value:
        keys = ", ".join(map(str, value)) or "none"
        return Score.failed("data_error", f"returned a dict without 'score' (its keys: {keys})")
    extra = {str(key): item for key, item in value.items() if key != "score"}
    return _from_number(value["score"], extra_of(extra))


def _from_tuple(value: tuple[Any, ...]) -> Score:
    if len(value) != 3:
        return Score.failed("data_error", f"returned a tuple of {len(value)}; {_EXPECTED}")
    score, request_text, explanation = value
    return _from_number(score, extra_of({"request_text": request_text, "explanation": explanation}))


def _from_number(value: Any, extra: dict[str, float | str]) -> Score:
    if value is None:
        return Score("skipped", reason="the function returned None", extra=extra)
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return Score("data_error", reason=f"returned {type(value).__name__}; {_EXPECTED}", extra=extra)
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        return Score(
            "data_error", reason=f"returned {type(value).__name__}, which is not a number: {error}", extra=extra
        )
    if not math.isfinite(number):
        return Score("data_error", reason=f"the value {number} is not finite", extra=extra)
    return Score("scored", number, extra=extra)


def extra_of(items: Mapping[str, Any]) -> dict[str, float | str]:
    """Return the further numbers and texts of a result; values that are not finite are left out, never made zero."""
    extra: dict[str, float | str] = {}
    for key, item in items.items():
        plain = _plain(item)
        if plain is not None:
            extra[key] = plain
    return extra


def _plain(item: Any) -> float | str | None:
    if item is None:
        return None
    if isinstance(item, str):
        return item[:_MAX_TEXT_CHARACTERS]
    if hasattr(item, "__float__"):
        try:
            number = float(item)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            return str(item)[:_MAX_TEXT_CHARACTERS]
        return number if math.isfinite(number) else None
    return json.dumps(item, default=str)[:_MAX_TEXT_CHARACTERS]
