"""``loss.kind: cispo``: the ratio weighs a token's gradient and is cut, but no token loses its gradient.

``l_t = -sg[clip(r_t, 1 - clipLow, 1 + clipHigh)] · A_t · log π_θ``. Source: MiniMax 2025, MiniMax-M1 (arXiv
2506.13585), as verl computes it. TRL bounds the ratio from above only: give ``clipLow`` near 1 for that. Degenerate: at
ratio 1 its gradient is the plain policy gradient, but its value is not that of ``ppo``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plaudit_workers.training.model.losses.correction import exp_ratio
from plaudit_workers.training.model.losses.tokens import TokenInputs, TokenLosses

if TYPE_CHECKING:
    from plaudit_workers.job.spec.algorithm import LossSpec


def cispo(tokens: TokenInputs, anchor: Tensor, settings: LossSpec) -> TokenLosses:
    """Return the losses of verl's ``cispo``; see ``ppo.ppo`` for the arguments."""
    ratio = exp_ratio(tokens.logprobs.detach(), anchor)
    cut = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    nowhere = torch.zeros_like(ratio, dtype=torch.bool)
    return TokenLosses(-cut * tokens.advantages * tokens.logprobs, cut != ratio, nowhere)
