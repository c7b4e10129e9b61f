"""``loss.kind: ppo``: the clipped ratio, with clip-higher and dual clip.

``l_t = -min(r_t A_t, clip(r_t, 1 - clipLow, 1 + clipHigh) A_t)`` with ``r_t = exp(log π_θ - anchor)``; where ``A_t <
0`` no more than ``-clipRatioC · A_t``. Sources: Schulman et al. 2017, PPO (arXiv 1707.06347); clip-higher: Yu et al.
2025, DAPO (arXiv 2503.14476); dual clip: Ye et al. 2020 (arXiv 1912.09729). Degenerate: at ratio 1 the gradient is the
plain policy gradient and nothing is clipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plaudit_workers.training.model.losses.correction import exp_ratio
from plaudit_workers.training.model.losses.tokens import TokenInputs, TokenLosses

if TYPE_CHECKING:
    from plaudit_workers.job.spec.algorithm import LossSpec


def ppo(tokens: TokenInputs, anchor: Tensor, settings: LossSpec) -> TokenLosses:
    """Return the losses of verl's ``vanilla``.

    Args:
        anchor: float32[R], log-probability under the policy around which the ratio is clipped.
    """
    ratio = exp_ratio(tokens.logprobs, anchor)
    unclipped = ratio * tokens.advantages
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * tokens.advantages
    gains = torch.minimum(unclipped, clipped)
    bounded = torch.zeros_like(gains, dtype=torch.bool)
    if settings.clip_ratio_c:
        least = settings.clip_ratio_c * tokens.advantages
        bounded = (tokens.advantages < 0) & (gains < least)
        gains = torch.where(bounded, least, gains)
    return TokenLosses(-gains, clipped < unclipped, bounded)
