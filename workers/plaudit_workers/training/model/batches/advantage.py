"""Compute the advantages of samples, one function per estimator.

Called by ``batch.make_batch`` with the scored samples of the groups of one update; masked samples (no score) are
already left out, so a baseline is never made of an invented zero.

Shapes: ``S`` scored samples in ``G`` groups. Every estimator takes ``scores: float64[S]``, ``group: int64[S]`` (which
of the G groups a sample belongs to) and ``num_tokens: int64[S]`` (trained tokens of its response), and returns
``float64[S]``: one advantage a sample, shared by all its tokens, since rewards are given to whole responses.

A group of one survivor has no baseline and a group whose scores are all equal teaches nothing about which response is
better: in both cases the group-relative estimators (all but REINFORCE++) return exactly 0 (verl gives a lone survivor
its score as advantage, which pushes towards whatever survived). ``degenerate_groups`` counts them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Estimator = Callable[[Floats, Ints, Ints], Floats]

STD_EPSILON = 1e-6
"""Added to a group's standard deviation, as in verl."""
VARIANCE_EPSILON = 1e-8
"""Added to the batch's variance in REINFORCE++, as in verl's ``masked_whiten``."""


@dataclass(frozen=True)
class DegenerateGroups:
    """Count groups without a group-relative signal."""

    single: int
    """One survivor."""
    zero_variance: int
    """Two or more survivors with equal scores."""


def grpo(scores: Floats, group: Ints, num_tokens: Ints) -> Floats:
    """Return the group-relative advantage, with the group's spread divided out.

    ``A_i = (r_i - mean_g) ÷ (std_g + 1e-6)``, ``std_g`` with n - 1 in the denominator (torch's default, as verl and
    TRL). Source: Shao et al. 2024, DeepSeekMath (arXiv 2402.03300), section 4.1. Degenerate: 0, see the module.
    """
    centred = dr_grpo(scores, group, num_tokens)
    sizes = np.bincount(group)
    variance = np.bincount(group, weights=centred**2) / np.maximum(sizes - 1, 1)
    advantages: Floats = centred / (np.sqrt(variance)[group] + STD_EPSILON)
    return advantages


def dr_grpo(scores: Floats, group: Ints, num_tokens: Ints) -> Floats:
    """Return GRPO's advantage without the division, which favours questions nearly solved or nearly hopeless.

    ``A_i = r_i - mean_g``. Source: Liu et al. 2025, Understanding R1-Zero-Like Training (arXiv 2503.20783), which
    also divides the summed token losses by a constant: ``loss.aggregation: constant``. Degenerate: 0.
    """
    sizes = np.bincount(group)
    means = np.bincount(group, weights=scores) / np.maximum(sizes, 1)
    # A mean of equal floats may miss them by a rounding error, which the division by a tiny std would blow up.
    advantages: Floats = np.where(_has_spread(scores, group)[group], scores - means[group], 0.0)
    return advantages


def rloo(scores: Floats, group: Ints, num_tokens: Ints) -> Floats:
    """Return each sample's score minus the mean of the others of its group.

    ``A_i = r_i - (Σ_{j≠i} r_j) ÷ (n - 1) = n ÷ (n - 1) · (r_i - mean_g)``. Source: Ahmadian et al. 2024, Back to
    Basics (arXiv 2402.14740). Degenerate: 0 (a group of one has no others).
    """
    sizes = np.bincount(group)
    factor = sizes / np.maximum(sizes - 1, 1)
    advantages: Floats = dr_grpo(scores, group, num_tokens) * factor[group]
    return advantages


def reinforce_plus_plus(scores: Floats, group: Ints, num_tokens: Ints) -> Floats:
    """Return the rewards normalised over all tokens of the update; groups are ignored.

    ``A_i = (r_i - μ) ÷ √(σ² + 1e-8)`` with μ and σ² over the tokens of the update (a sample counts once per trained
    token, σ² with N - 1), which is verl's ``reinforce_plus_plus`` with discount 1. Source: Hu 2025, REINFORCE++
    (arXiv 2501.03262); its KL term is the loss's here (``klCoefficient``). Degenerate: fewer than two tokens, or all
    rewards equal: 0. With mini-batches the statistics are those of the mini-batch.
    """
    tokens = num_tokens.sum()
    if tokens < 2 or scores.size == 0 or scores.max() == scores.min():
        return np.zeros_like(scores)
    mean = float((scores * num_tokens).sum() / tokens)
    variance = float((num_tokens * (scores - mean) ** 2).sum() / (tokens - 1))
    advantages: Floats = (scores - mean) / np.sqrt(variance + VARIANCE_EPSILON)
    return advantages


def reinforce_plus_plus_baseline(scores: Floats, group: Ints, num_tokens: Ints) -> Floats:
    """Return the rewards minus their group's mean, then normalised over all tokens of the update.

    ``A_i = whiten(r_i - mean_g)``, the normalisation of ``reinforce_plus_plus``; verl's
    ``reinforce_plus_plus_baseline``. Source: Hu 2025, REINFORCE++ (arXiv 2501.03262). Degenerate: a lone survivor
    counts as reward = mean (in verl its mean is 0); groups without spread get the negative mean, which is near 0; all
    equal: 0.
    """
    return reinforce_plus_plus(dr_grpo(scores, group, num_tokens), group, num_tokens)


ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo,
    "drGrpo": dr_grpo,
    "rloo": rloo,
    "reinforcePlusPlus": reinforce_plus_plus,
    "reinforcePlusPlusBaseline": reinforce_plus_plus_baseline,
}
"""``algorithm.advantage`` of the job → its estimator."""


def degenerate_groups(scores: Floats, group: Ints) -> DegenerateGroups:
    """Count groups without a group-relative signal.

    Args:
        scores: float64[S].
        group: int64[S], every number from 0 to its maximum used at least once.
    """
    sizes = np.bincount(group)
    spread = _has_spread(scores, group)
    return DegenerateGroups(int((sizes == 1).sum()), int(((sizes > 1) & ~spread).sum()))


def _has_spread(scores: Floats, group: Ints) -> NDArray[np.bool_]:
    """Return bool[G]: two scores of the group differ."""
    num_groups = int(group.max()) + 1 if group.size else 0
    highest = np.full(num_groups, -np.inf)
    lowest = np.full(num_groups, np.inf)
    np.maximum.at(highest, group, scores)
    np.minimum.at(lowest, group, scores)
    differs: NDArray[np.bool_] = highest > lowest
    return differs
