"""``loss.kind: dppo``: a token is left out when its probability, not its ratio, has moved too far in its direction.

``l_t = -sg[min(r_t, clipRatioC)] · A_t · log π_θ · keep_t``, where ``keep_t`` is false if ``A_t > 0`` and ``π_θ -
π_anchor > clipHigh``, or ``A_t <= 0`` and ``π_anchor - π_θ > clipLow``: the clips are differences of probabilities
here. A ratio punishes rare tokens for moves that hardly change the distribution. Source: 2026, DPPO (arXiv 2602.04879),
binary total variation, as in verl (``dppo_tv``); its mask is that of prime-rl's default loss, without that loss's
penalty on the squared log-ratio. Degenerate: equal policies keep every token and give the plain policy gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plaudit_workers.training.model.losses.correction import exp_ratio
from plaudit_workers.training.model.losses.tokens import TokenInputs, TokenLosses

if TYPE_CHECKING:
    from plaudit_workers.job.spec.algorithm import LossSpec


def dppo(tokens: TokenInputs, anchor: Tensor, settings: LossSpec) -> TokenLosses:
    """Return the losses of verl's ``dppo_tv``; see ``ppo.ppo`` for the arguments."""
    frozen = tokens.logprobs.detach()
    ratio, moved = exp_ratio(frozen, anchor), frozen.exp() - anchor.exp()
    keep = torch.where(tokens.advantages > 0, moved <= settings.clip_high, moved >= -settings.clip_low)
    cut = ratio.clamp(max=settings.clip_ratio_c) if settings.clip_ratio_c else ratio
    return TokenLosses(-cut * tokens.advantages * tokens.logprobs * keep, ~keep, (cut < ratio) & keep)
