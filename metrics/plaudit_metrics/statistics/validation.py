"""Compute the figures of a validation: ``val/<data source>/reward``, and those of several samples a prompt."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

_PREFIX, _SUFFIX = "val/", "/reward"


def validation_rewards(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the mean validation reward by data source, from the figures ``val/<data source>/reward``.

    A data source may itself contain slashes.
    """
    return {
        key.removeprefix(_PREFIX).removesuffix(_SUFFIX): value
        for key, value in figures.items()
        if key.startswith(_PREFIX) and key.endswith(_SUFFIX)
    }


def best_of(values: Sequence[float], count: int) -> float:
    """Return the expected maximum of ``count`` (at least 1) of the values, drawn without replacement.

    With the values in order, the i-th (from 1) is the maximum of C(i - 1, count - 1) of the C(N, count) draws. For
    values 0 and 1 this is pass@k (Chen et al., 2021, arXiv 2107.03374).

    Args:
        values: rewards of the samples of one prompt; at least ``count``.
    """
    draws = math.comb(len(values), count)
    ordered = enumerate(sorted(values))
    return math.fsum(value * math.comb(below, count - 1) / draws for below, value in ordered)


def majority(answers: Sequence[tuple[str, float]]) -> float:
    """Return the mean reward of the most frequent answer; of equally frequent ones the first.

    Args:
        answers: (answer, reward) of each sample of one prompt; at least one.
    """
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for answer, reward in answers:
        rewards[answer].append(reward)
    most = max(rewards.values(), key=len)
    return math.fsum(most) / len(most)
