"""Normalise the values of several scorers within a group before they are summed: GDPO. Pure functions.

For each scorer k and each sample i of a group: ``(r_ik - mean_k) ÷ (std_k + 1e-6)`` over the group's samples that have
a value of k, the standard deviation with n - 1 (torch's default, as in ``advantage.grpo``); the weighted sum follows.
A sum of raw rewards, normalised afterwards as GRPO does, gives different combinations of rewards the same advantage.

Source: Liu et al. 2026, GDPO: Group reward-Decoupled Normalization Policy Optimization (arXiv 2601.05242). Its second
step, a normalisation over the batch, is the trainer's ``advantage: reinforcePlusPlus``. Degenerate: a scorer with a
single value, or the same value for all samples, does not distinguish them and contributes 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from plaudit_reward.pipeline.combine import ScorerPart, counted_value

_STD_EPSILON = 1e-6


def normalised(group: Sequence[Sequence[ScorerPart]]) -> list[list[ScorerPart]]:
    """Return the parts of a group's samples with each scorer's values normalised over the group.

    Args:
        group: for each sample its parts; a part without a value (a failure that does not count as zero, a skipped
            scorer) is unchanged and excluded from mean and deviation.
    """
    values: dict[str, list[float]] = {}
    for parts in group:
        for part in parts:
            if (value := counted_value(part)) is not None:
                values.setdefault(part.name, []).append(value)
    scales = {name: _scale(of_scorer) for name, of_scorer in values.items()}
    return [[_normalised(part, *scales.get(part.name, (0.0, 0.0))) for part in parts] for parts in group]


def _scale(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the factor for the distance from it."""
    if min(values) == max(values):
        return values[0], 0.0
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, 1 / (math.sqrt(variance) + _STD_EPSILON)


def _normalised(part: ScorerPart, mean: float, factor: float) -> ScorerPart:
    value = counted_value(part)
    if value is None:
        return part
    return replace(part, record=msgspec.structs.replace(part.record, outcome="scored", value=(value - mean) * factor))
