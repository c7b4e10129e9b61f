"""``loss.kind: gspo``: one ratio a sequence, the geometric mean of its tokens' ratios, clipped as a whole.

``s_i = exp(mean_t (log π_θ - anchor))``, ``l_t = -min(s A, clip(s, 1 - clipLow, 1 + clipHigh) A)``; the gradient flows
through each token's own log-probability (``s_it = sg[s_i] · π_θ ÷ sg[π_θ]``). The paper's clips are about 3e-4 and
4e-4, with ``aggregation: sequence``. Source: Zheng et al. 2025, GSPO (arXiv 2507.18071), as verl computes it (log-ratio
at most 10). Degenerate: with responses of one token it is ``ppo`` without dual clip.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plaudit_workers.training.model.losses.tokens import TokenInputs, TokenLosses, sequence_means

if TYPE_CHECKING:
    from plaudit_workers.job.spec.algorithm import LossSpec

_MAX_LOG_RATIO = 10.0


def gspo(tokens: TokenInputs, anchor: Tensor, settings: LossSpec) -> TokenLosses:
    """Return the losses of verl's ``gspo``; see ``ppo.ppo`` for the arguments."""
    frozen = tokens.logprobs.detach()
    of_sequence = sequence_means(frozen - anchor, tokens.lengths)
    ratio = (tokens.logprobs - frozen + of_sequence).clamp(max=_MAX_LOG_RATIO).exp()
    unclipped = ratio * tokens.advantages
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * tokens.advantages
    nowhere = torch.zeros_like(ratio, dtype=torch.bool)
    return TokenLosses(-torch.minimum(unclipped, clipped), clipped < unclipped, nowhere)
