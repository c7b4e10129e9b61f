"""``loss.klIn: reward``: the divergence from the starting weights lowers the rewards instead of raising the loss.

``r'_i = r_i - klCoefficient · Σ_t k_it`` over the trained tokens of sample i, with ``k`` the estimate ``klEstimator``
between the policy around which the loss is clipped and the starting weights. Advantages are computed from r', so the
penalty has no gradient of its own. Source: Ouyang et al. 2022, InstructGPT (arXiv 2203.02155), as verl's
``apply_kl_penalty`` with an advantage of whole responses, which sums the tokens. Degenerate:
equal policies leave the rewards as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class PenalisedScores:
    """Hold the rewards of an update after the penalty."""

    scores: Floats
    """float64[S]: r'."""
    figures: dict[str, float]


def penalise(
    scores: Floats, owners: Sequence[int], divergences: Sequence[NDArray[np.float32]], coefficient: float
) -> PenalisedScores:
    """Subtract the divergence of each sample from its reward.

    Args:
        scores: float64[S].
        owners: the sample (0 … S - 1) of each token sequence: a sample may have branches.
        divergences: of each sequence, one estimate a trained token.

    Returns:
        The lowered rewards; the mean over samples of the mean over their tokens, under verl's name.
    """
    sums, num_tokens = np.zeros_like(scores), np.zeros_like(scores)
    for owner, own in zip(owners, divergences, strict=True):
        sums[owner] += own.sum(dtype=np.float64)
        num_tokens[owner] += own.size
    trained = num_tokens > 0
    figures = {"actor/reward_kl_penalty_coeff": coefficient}
    if trained.any():
        figures["actor/reward_kl_penalty"] = float((sums[trained] / num_tokens[trained]).mean())
    return PenalisedScores(scores - coefficient * sums, figures)
