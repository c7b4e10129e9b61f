"""What is done about samples that an older policy, or a slightly different engine, drew.

Called by ``loss``. Three policies meet in an update: μ, the *behaviour* policy that sampled a token (its
log-probability came with the sample); π_prox, the *proximal* policy around which the loss is clipped; π_θ, the one
being trained.

| ``loss.correction`` | clipped ratio | importance weight | π_prox |
| --- | --- | --- | --- |
| ``none`` | π_θ ÷ μ | 1 | μ itself |
| ``tis`` | π_θ ÷ π_prox | min(π_prox ÷ μ, cap) | π_θ as this update begins: comes out of the same forward pass |
| ``decoupled`` | π_θ ÷ π_prox | min(π_prox ÷ μ, cap) | the newest published policy: the step began with it |

A batch is used for one optimizer step. Under ``tis`` the ratio is therefore 1 when its gradient is taken, the clip does
not bind, and the truncated weight alone bounds what a stale token can do. Under ``decoupled`` the clip bounds how far
the mini-batches of a step move away from the policy that the step began with; with ``miniBatchesPerStep: 1`` both are
the same, and no extra forward pass is made.

Sources: ``tis`` Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (verl's
token-level rollout correction); ``decoupled`` Hilton et al. 2021 (arXiv 2110.00641) as in AReaL (arXiv
2505.24298), with the weight truncated rather than unbounded.
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
    """What the loss needs to know of the older policies, one figure a token."""

    anchor: Tensor
    """float32[R]: log-probability under the policy around which the loss is clipped."""
    weight: Tensor
    """float32[R]: factor of the token's policy-gradient term."""
    capped: Tensor
    """bool[R]: the importance weight was cut."""


def correct(kind: Correction, behaviour: Tensor, proximal: Tensor, cap: float) -> Corrected:
    """Chooses the anchor of the clip and the importance weights. No gradient flows through either.

    Args:
        kind: ``loss.correction``.
        behaviour: float32[R], log μ of each trained token.
        proximal: float32[R], log π_prox of each trained token; not read when ``kind`` is ``none``.
        cap: ``loss.correctionCap``; weights above it are cut.
    """
    if kind == "none":
        ones = torch.ones_like(behaviour)
        return Corrected(behaviour, ones, torch.zeros_like(ones, dtype=torch.bool))
    proximal = proximal.detach()
    ratio = exp_ratio(proximal, behaviour)
    return Corrected(proximal, ratio.clamp(max=cap), ratio > cap)


def exp_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """``exp(numerator - denominator)`` of log-probabilities, the difference cut to ±20 so that it stays finite."""
    return (numerator - denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
