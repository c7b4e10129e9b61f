"""The result of one scorer for one sample."""

from __future__ import annotations

import math
from typing import Self

import msgspec

from plaudit_wire.records import Outcome


class Score(msgspec.Struct, frozen=True, omit_defaults=True):
    """A typed result: a value exists only with outcome ``scored``, so a failure can never look like a zero."""

    outcome: Outcome
    value: float | None = None
    reason: str | None = None
    extra: dict[str, float | str] = {}

    def __post_init__(self) -> None:
        if (self.value is not None) != (self.outcome == "scored"):
            raise ValueError(f"a score has a value exactly when its outcome is 'scored', not {self!r}")

    @classmethod
    def scored(cls, value: float, **extra: float | str) -> Self:
        """Return a score with a value; NaN and infinities become a ``data_error``."""
        if not math.isfinite(value):
            return cls("data_error", reason=f"the value {value} is not finite", extra=extra)
        return cls("scored", float(value), extra=extra)

    @classmethod
    def failed(cls, outcome: Outcome, reason: str) -> Self:
        """Return a score without a value."""
        return cls(outcome, reason=reason)
