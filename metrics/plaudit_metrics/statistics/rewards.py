"""Compute statistics of a step's rewards: spread, groups without a signal, length against reward. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from plaudit_metrics.statistics.columns import SampleColumns

Floats = NDArray[np.float64]


def reward_statistics(columns: SampleColumns) -> dict[str, float]:
    """Return the ``reward/…`` figures over the samples that have a score; empty if there are none."""
    scored = ~np.isnan(columns.value)
    if not scored.any():
        return {}
    value, group = columns.value[scored], columns.group[scored]
    return {
        "reward/mean": float(value.mean()),
        "reward/std": float(value.std()),
        "reward/min": float(value.min()),
        "reward/max": float(value.max()),
        **_group_shares(value, group, len(columns.groups)),
        **_length_correlation(value, group, columns.response_tokens[scored].astype(np.float64)),
    }


def _group_shares(value: Floats, group: NDArray[np.int64], num_groups: int) -> dict[str, float]:
    """Return shares of the groups with at least two scores: all equal, all solved (at least 1), none (at most 0)."""
    least, most = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(least, group, value)
    np.maximum.at(most, group, value)
    compared = np.bincount(group, minlength=num_groups) >= 2
    if not compared.any():
        return {}
    return {
        "reward/zero_variance_share": float((least == most)[compared].mean()),
        "reward/solved_all_share": float((least >= 1)[compared].mean()),
        "reward/solved_none_share": float((most <= 0)[compared].mean()),
    }


def _length_correlation(value: Floats, group: NDArray[np.int64], tokens: Floats) -> dict[str, float]:
    """Return Pearson's correlation of reward and response length within groups.

    Each is taken relative to the mean of its group: hard prompts have long responses and low rewards, which says
    nothing about length. Degenerate: without differences within a group there is no figure.
    """
    reward, length = _centred(value, group), _centred(tokens, group)
    scale = float(np.sqrt((reward**2).sum() * (length**2).sum()))
    return {"reward/length_correlation": float((reward * length).sum()) / scale} if scale > 1e-9 else {}


def _centred(values: Floats, group: NDArray[np.int64]) -> Floats:
    sums, counts = np.bincount(group, values), np.bincount(group)
    centred: Floats = values - (sums / np.maximum(counts, 1))[group]
    return centred
