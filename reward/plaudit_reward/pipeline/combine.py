"""Combine the results of a sample's scorers: one value, or the outcome of the scorer that failed. Pure functions.

``weightedSum``: reward = Σ weightᵢ · valueᵢ over the scorers that have a value.

A scorer of non-zero weight without a value passes its outcome to the sample, unless its ``onFailure`` is

- ``zero``: this scorer counts as value 0 (the user's explicit choice);
- ``ignore``: it is left out of the sum; if no other scorer has a value, the sample has none;
- ``dropGroup``: as ``mask``, and the whole group is excluded from training.

A scorer skipped by its ``when`` is left out of the sum and is no failure. A scorer that returned None masks its sample
(outcome ``skipped``) unless ``onFailure`` is ``ignore``; ``zero`` and ``dropGroup`` apply to failures only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from plaudit_reward.score import Score
from plaudit_wire.records import ScorerRecord

FailurePolicy = Literal["mask", "zero", "dropGroup", "ignore"]


@dataclass(frozen=True)
class ScorerPart:
    """One scorer's part in a sample's reward."""

    name: str
    weight: float
    on_failure: FailurePolicy
    record: ScorerRecord

    @property
    def held_back(self) -> bool:
        """Return True if its ``when`` skipped it: there was no attempt."""
        return self.record.attempts == 0


@dataclass(frozen=True)
class Combined:
    """The combined result."""

    score: Score
    drop_group: bool = False


def weighted_sum(parts: Sequence[ScorerPart], *, provisional: bool = False) -> Combined:
    """Return the reward of one sample.

    Args:
        provisional: group-scope scorers follow, so a sample without a failure counts as scored until they have
            run (and has no value if they never run).
    """
    counted = [part for part in parts if part.weight != 0]
    failed = first_failure(counted)
    if failed is not None:
        return failed
    total, any_value = 0.0, False
    for part in counted:
        if (value := counted_value(part)) is not None:
            total, any_value = total + part.weight * value, True
    if any_value or provisional:
        return Combined(Score.scored(total))
    return _nothing(counted or parts)


def first_failure(parts: Sequence[ScorerPart]) -> Combined | None:
    """Return the outcome that one of the scorers decides: failures before skips, in the job's order."""
    deciding = [part for part in parts if _decides(part)]
    for part in sorted(deciding, key=lambda part: not part.record.has_failed):
        drops = part.record.has_failed and part.on_failure == "dropGroup"
        return Combined(Score.failed(part.record.outcome, f"{part.name}: {part.record.reason}"), drops)
    return None


def values_of(parts: Sequence[ScorerPart]) -> dict[str, float | None]:
    """Return the scorers' values by name, for a combining function; a failure that counts as zero is 0."""
    return {part.name: counted_value(part) for part in parts}


def counted_value(part: ScorerPart) -> float | None:
    """Return the part's value; 0 for a failure with policy ``zero``; None if it does not count."""
    return 0.0 if part.record.has_failed and part.on_failure == "zero" else part.record.value


def _decides(part: ScorerPart) -> bool:
    if part.record.is_scored or part.held_back or part.on_failure == "ignore":
        return False
    return part.on_failure != "zero" or not part.record.has_failed


def _nothing(parts: Sequence[ScorerPart]) -> Combined:
    """Return the sample's outcome when no scorer with a weight has a value: that of the first of them."""
    if not parts:
        return Combined(Score.failed("skipped", "no scorer applies to this sample"))
    failures = [part for part in parts if part.record.has_failed] or list(parts)
    record = failures[0].record
    outcome = "skipped" if record.outcome == "scored" else record.outcome
    return Combined(Score.failed(outcome, f"{failures[0].name}: {record.reason or 'it has weight 0'}"))
