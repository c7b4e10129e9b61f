"""Correct for samples that an older policy, or a slightly different engine, drew.

Called by ``loss``. Three policies meet in an update: μ, the *behaviour* policy that sampled a token (its
log-probability came with the sample); π_prox, the *proximal* policy around which the loss is clipped; π_θ, the one
being trained.

| ``loss.correction`` | clipped ratio | importance weight c | above ``correctionCap`` |
| --- | --- | --- | --- |
| ``none`` | π_θ ÷ μ | 1 | - |
| ``tis`` | π_θ ÷ π_prox | π_prox ÷ μ | c is cut to the cap |
| ``decoupled`` | π_θ ÷ π_prox | π_prox ÷ μ | the token's policy-gradient term is left out |

π_prox is the newest published policy, with which the step began (verl's "old" policy). Each batch is used for one
optimizer step: with ``miniBatchesPerStep: 1`` π_prox is π_θ itself and costs nothing; with more, the clip bounds how
far the step's later mini-batches move away from its beginning, at the price of one more forward pass and one more copy
of the (sharded) weights. Truncated weights alone would not bound that: with four updates a step on samples two versions
old, the tiny model of the examples unlearns its task again.

Sources: ``tis`` Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, as verl's
token-level rollout correction; ``decoupled`` Hilton et al. 2021 (arXiv 2110.00641) as in AReaL (arXiv 2505.24298) with
its cap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Correction = Literal["none", "tis", "decoupled"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here before they are exponentiated, as in verl: e^20 is finite in float32, e^100 is not."""


@dataclass(frozen=True)
class Corrected:
    """Inputs of the loss from the older policies, one value per token."""

    anchor: Tensor
    """float32[R]: log-probability under the policy around which the loss is clipped."""
    weight: Tensor
    """float32[R]: factor of the token's policy-gradient term."""
    capped: Tensor
    """bool[R]: the importance weight was above the cap."""


def correct(kind: Correction, behaviour: Tensor, proximal: Tensor, cap: float) -> Corrected:
    """Choose the anchor of the clip and the importance weights. No gradient flows through either.

    Args:
        kind: ``loss.correction``.
        behaviour: float32[R], log μ of each trained token.
        proximal: float32[R], log π_prox of each trained token; not read when ``kind`` is ``none``.
        cap: ``loss.correctionCap``.
    """
    if kind == "none":
        ones = torch.ones_like(behaviour)
        return Corrected(behaviour, ones, torch.zeros_like(ones, dtype=torch.bool))
    proximal = proximal.detach()
    ratio = exp_ratio(proximal, behaviour)
    capped = ratio > cap
    weight = ratio.clamp(max=cap) if kind == "tis" else ratio.masked_fill(capped, 0.0)
    return Corrected(proximal, weight, capped)


def exp_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """``exp(numerator - denominator)`` of log-probabilities, the difference cut to ±20 so that it stays finite."""
    return (numerator - denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
