"""Correct for samples that an older policy, or a slightly different engine, drew.

Called by ``model.loss``. Three policies meet in an update: μ, the *behaviour* policy that sampled a token (its
log-probability came with the sample); π_prox, the *proximal* policy around which the loss is clipped; π_θ, the one
being trained.

| ``loss.correction`` | clipped ratio | importance weight c | above ``correctionCap`` |
| --- | --- | --- | --- |
| ``none`` | π_θ ÷ μ | 1 | - |
| ``tis`` | π_θ ÷ π_prox | π_prox ÷ μ | c is cut to the cap |
| ``decoupled`` | π_θ ÷ π_prox | π_prox ÷ μ | the policy-gradient term is left out, below ``correctionFloor`` too |
| ``reject`` | π_θ ÷ π_prox | 1 | the same |

``loss.correctionLevel`` chooses the ratio ``π_prox ÷ μ`` that is weighed and compared: a ``token``'s own, the product
over its ``sequence``, or their ``geometric`` mean (for sequences of any length; the product leaves [1/2, 2] soon).

π_prox is the newest published policy, with which the step began (verl's "old" policy). With one update a step
(``miniBatchesPerStep`` and ``epochs`` 1) π_prox is π_θ itself and costs nothing; with more, the clip bounds how far the
step's later updates move away from its beginning, at the price of one more forward pass and one more copy of the
(sharded) weights. Truncated weights alone would not bound that: with four updates a step on samples two versions
old, the tiny model of the examples unlearns its task again.

Sources: ``tis`` Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, as verl's
rollout correction (``rollout_is: token``, ``sequence``); with a floor, ``decoupled`` is IcePop; ``reject`` is verl's
``rollout_rs: token_k1, seq_sum_k1, seq_mean_k1`` for the inverse bounds, but the aggregation still counts rejected
tokens; ``decoupled`` Hilton et al. 2021 (arXiv 2110.00641) as in AReaL (arXiv 2505.24298) with its cap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plaudit_workers.training.model.losses.tokens import TokenInputs, sequence_means, sequence_sums

if TYPE_CHECKING:
    from plaudit_workers.job.spec.algorithm import LossSpec

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here before they are exponentiated, as in verl: e^20 is finite in float32, e^100 is not."""


@dataclass(frozen=True)
class Corrected:
    """Hold inputs of the loss from the older policies, one value per token."""

    anchor: Tensor
    """float32[R]: log-probability under the policy around which the loss is clipped."""
    weight: Tensor
    """float32[R]: factor of the token's policy-gradient term."""
    capped: Tensor
    """bool[R]: the importance weight was above the cap, or below the floor."""


def correct(tokens: TokenInputs, settings: LossSpec) -> Corrected:
    """Choose the anchor of the clip and the importance weights. No gradient flows through either.

    Args:
        tokens: ``proximal`` is not read when ``correction`` is ``none``.
    """
    kind, behaviour = settings.correction, tokens.behaviour
    if kind == "none":
        ones = torch.ones_like(behaviour)
        return Corrected(behaviour, ones, torch.zeros_like(ones, dtype=torch.bool))
    proximal = tokens.proximal.detach()
    log_ratio = proximal - behaviour
    if settings.correction_level == "sequence":
        log_ratio = sequence_sums(log_ratio, tokens.lengths)
    elif settings.correction_level == "geometric":
        log_ratio = sequence_means(log_ratio, tokens.lengths)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if kind == "tis":
        return Corrected(proximal, ratio.clamp(max=settings.correction_cap), ratio > settings.correction_cap)
    outside = (ratio > settings.correction_cap) | (ratio < settings.correction_floor)
    weight = ratio if kind == "decoupled" else torch.ones_like(ratio)
    return Corrected(proximal, weight.masked_fill(outside, 0.0), outside)


def exp_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return ``exp(numerator - denominator)`` of log-probabilities, the difference cut to ±20: it stays finite."""
    return (numerator - denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
