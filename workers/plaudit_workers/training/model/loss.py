"""The policy loss: clipped ratio with clip-higher, importance weights, optional KL and entropy terms.

Called by ``policy_model`` for each micro-batch. Each term is a sum over tokens of ``aggregation weight x token loss``,
with weights from the *whole* update (``token_weights``): sums over micro-batches and ranks add up to the same loss
whatever the packing.

| ``loss.aggregation`` | verl's ``loss_agg_mode`` | weight of a token of sequence i |
| --- | --- | --- |
| ``token`` | ``token-mean`` | 1 ÷ N |
| ``sequence`` | ``seq-mean-token-mean`` | 1 ÷ (S · T_i) |

S sequences, T_i trained tokens of sequence i, N = Σ T_i; R trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plaudit_workers.job.spec.algorithm import LossSpec
from plaudit_workers.training.model.correction import MAX_LOG_RATIO, correct, exp_ratio

MAX_K3 = 10.0
"""The k3 estimate of a token's divergence is cut here, as in verl: at a log-ratio of -10 it would be 22,000."""


@dataclass(frozen=True)
class TokenInputs:
    """Inputs of the loss for each trained token of a micro-batch; all float32[R]."""

    logprobs: Tensor
    """log π_θ, with gradient."""
    proximal: Tensor
    """log π_prox (see ``correction``)."""
    behaviour: Tensor
    """log μ."""
    advantages: Tensor
    weights: Tensor
    """Aggregation weights."""
    entropies: Tensor | None = None
    """Entropy of the token's distribution, with gradient; needed when ``entropyCoefficient`` is not 0."""
    reference: Tensor | None = None
    """log π_ref of the starting weights; needed when ``klCoefficient`` is not 0."""


@dataclass(frozen=True)
class LossTerms:
    """The loss of a micro-batch and its parts."""

    total: Tensor
    """Scalar with gradient."""
    sums: dict[str, Tensor]
    """Detached scalars, already weighted: their sum over micro-batches and ranks is the update's figure."""


def token_weights(aggregation: str, lengths: Sequence[int]) -> list[float]:
    """Return the aggregation weight of each sequence's tokens.

    Args:
        aggregation: ``loss.aggregation``.
        lengths: trained tokens of each sequence of the update, all at least 1.

    Returns:
        One weight a sequence; the weights of all tokens sum to 1.
    """
    if aggregation == "token":
        return [1 / sum(lengths)] * len(lengths)
    return [1 / (len(lengths) * length) for length in lengths]


def policy_loss(tokens: TokenInputs, settings: LossSpec) -> LossTerms:
    """Sum the loss of one micro-batch.

    ``L = Σ_t w_t · (-c_t · m_t + β · k3_t - η · H_t)`` with ``m_t = min(r_t A_t, clip(r_t, 1 - clipLow, 1 + clipHigh)
    A_t)``, below 0 no less than ``clipRatioC · A_t`` (dual clip); ``r_t = exp(log π_θ - anchor)``, ``c_t`` the
    importance weight, β ``klCoefficient``, η ``entropyCoefficient``.
    Sources: Schulman et al. 2017, PPO (arXiv 1707.06347); clip-higher: Yu et al. 2025, DAPO (arXiv 2503.14476); dual
    clip: Ye et al. 2020 (arXiv 1912.09729). Degenerate: advantages of 0 leave only the KL and entropy terms.
    """
    corrected = correct(settings.correction, tokens.behaviour, tokens.proximal, settings.correction_cap)
    ratio = exp_ratio(tokens.logprobs, corrected.anchor)
    unclipped = ratio * tokens.advantages
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * tokens.advantages
    gains = torch.minimum(unclipped, clipped)
    bounded = torch.zeros_like(gains, dtype=torch.bool)
    if settings.clip_ratio_c:
        least = settings.clip_ratio_c * tokens.advantages
        bounded = (tokens.advantages < 0) & (gains < least)
        gains = torch.where(bounded, least, gains)
    token_losses = -corrected.weight * gains
    drift = tokens.behaviour - tokens.logprobs.detach()
    figures = {
        "actor/pg_loss": token_losses,
        "actor/pg_clipfrac": (clipped < unclipped).float(),
        "actor/pg_clipfrac_lower": bounded.float(),
        "actor/ppo_kl": drift,
        "actor/behaviour_kl": drift.neg().clamp(max=MAX_LOG_RATIO).expm1() + drift,
        "actor/importance_weight": corrected.weight,
        "actor/importance_capped": corrected.capped.float(),
    }
    if settings.kl_coefficient and tokens.reference is not None:
        figures["actor/kl_loss"] = k3(tokens.logprobs, tokens.reference)
        token_losses = token_losses + settings.kl_coefficient * figures["actor/kl_loss"]
    if tokens.entropies is not None:
        figures["actor/entropy"] = tokens.entropies
        token_losses = token_losses - settings.entropy_coefficient * tokens.entropies
    sums = {name: (figure.detach() * tokens.weights).sum() for name, figure in figures.items()}
    return LossTerms((token_losses * tokens.weights).sum(), sums)


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Unbiased, never negative estimate of KL(π_θ ‖ π_ref) from tokens of π_θ: ``r - log r - 1``, ``r = π_ref ÷ π_θ``.

    Source: Schulman 2020, Approximating KL Divergence. As in verl, the log-ratio is cut to ±20 and the estimate to 10:
    a token beyond that has no gradient.

    Args:
        logprobs: float32[R], log π_θ, with gradient.
        reference: float32[R], log π_ref.
    """
    log_ratio = (reference - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (log_ratio.exp() - log_ratio - 1).clamp(max=MAX_K3)
