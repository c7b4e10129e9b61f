"""Serve TRL's ``log_extra`` and ``log_metric``: values that a function logs become extras of its scores."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from plaudit_reward.functions.result import extra_of
from plaudit_reward.score import Score
from plaudit_wire.errors import DataError

LOGGERS = ("log_extra", "log_metric")
"""The parameters through which a function logs."""


class LoggedResult(NamedTuple):
    """The result of a function, and the values that it logged."""

    result: Any
    columns: dict[str, list[Any]]
    """Name → one value for each sample."""
    metrics: dict[str, float]

    def add_to(self, scores: Sequence[Score]) -> list[Score]:
        """Return the scores with the logged values as extras.

        Raises:
            DataError: a column has not one value for each sample.
        """
        for name, values in self.columns.items():
            if len(values) != len(scores):
                raise DataError(f"log_extra({name!r}, …) got {len(values)} values for {len(scores)} samples")
        return [
            msgspec.structs.replace(score, extra={**score.extra, **extra_of({**self._of(place), **self.metrics})})
            for place, score in enumerate(scores)
        ]

    def _of(self, place: int) -> dict[str, Any]:
        return {name: values[place] for name, values in self.columns.items()}


def call_with_loggers(function: Callable[..., Any], passed: dict[str, Any], loggers: Sequence[str]) -> Any:
    """Call a function of TRL's form that may log, for a ``LoggedResult``; an async one returns its coroutine."""
    columns: dict[str, list[Any]] = {}
    metrics: dict[str, float] = {}

    def log_extra(column: str, values: Sequence[Any]) -> None:
        columns.setdefault(str(column), []).extend(values)

    def log_metric(name: str, value: float) -> None:
        metrics[str(name)] = float(value)

    available = {"log_extra": log_extra, "log_metric": log_metric}
    returned = function(**passed, **{name: available[name] for name in loggers})
    if not inspect.isawaitable(returned):
        return LoggedResult(returned, columns, metrics)

    async def awaited() -> LoggedResult:
        return LoggedResult(await returned, columns, metrics)

    return awaited()
