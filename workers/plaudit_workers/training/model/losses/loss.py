"""Compute the loss of a micro-batch: policy loss × importance weight, optional KL and entropy terms, aggregated.

Called by ``policy_model`` for each micro-batch. Each term is a sum over tokens of ``aggregation weight x token loss``,
with weights from the *whole* update (``losses.aggregation``): sums over micro-batches and ranks add up to the same loss
whatever the packing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plaudit_workers.training.model.losses.cispo import cispo
from plaudit_workers.training.model.losses.correction import MAX_LOG_RATIO, correct
from plaudit_workers.training.model.losses.custom import PolicyLoss, load_loss
from plaudit_workers.training.model.losses.divergence import ESTIMATES, importance_weighted
from plaudit_workers.training.model.losses.dppo import dppo
from plaudit_workers.training.model.losses.gspo import gspo
from plaudit_workers.training.model.losses.mismatch import FIGURE, LIMIT_FIGURE
from plaudit_workers.training.model.losses.ppo import ppo
from plaudit_workers.training.model.losses.tokens import TokenInputs

if TYPE_CHECKING:
    from plaudit_workers.job.spec.algorithm import LossSpec

LOSSES: dict[str, PolicyLoss] = {"ppo": ppo, "gspo": gspo, "cispo": cispo, "dppo": dppo}
"""Each ``loss.kind`` of ``LOSS_KINDS`` but ``python``, and its function."""


_WEIGHT = "weight"
"""Key of the sum of the tokens' weights."""
_AGGREGATED = ("actor/pg_loss", "actor/kl_loss")
"""Figures that are parts of the loss; all others are means over the tokens that had a gradient."""


@dataclass(frozen=True)
class LossTerms:
    """Hold the loss of a micro-batch and its parts."""

    total: Tensor
    """Scalar with gradient."""
    sums: dict[str, Tensor]
    """Detached scalars, already weighted: their sum over micro-batches and ranks is the update's figure."""


def choose_loss(settings: LossSpec) -> PolicyLoss:
    """Return the policy loss of ``loss.kind``.

    Raises:
        RefusedError: the user's file has no such function.
    """
    return load_loss(Path(settings.path), settings.function) if settings.kind == "python" else LOSSES[settings.kind]


def policy_loss(tokens: TokenInputs, settings: LossSpec, policy: PolicyLoss | None = None) -> LossTerms:
    """Sum the loss of one micro-batch.

    ``L = Σ_t w_t · (c_t · l_t + β · k_t - η · H_t)`` with ``l_t`` the policy loss of ``loss.kind``, ``c_t`` the
    importance weight (``losses.correction``), ``k_t`` the divergence from the starting weights, β ``klCoefficient``, η
    ``entropyCoefficient``. Degenerate: advantages of 0 leave only the KL and entropy terms.
    """
    corrected = correct(tokens, settings)
    found = (policy or choose_loss(settings))(tokens, corrected.anchor, settings)
    token_losses = corrected.weight * found.losses
    logprobs = tokens.logprobs.detach()
    drift = tokens.behaviour - logprobs
    figures = {
        "actor/pg_loss": token_losses,
        "actor/pg_clipfrac": found.clipped.float(),
        "actor/pg_clipfrac_lower": found.bounded.float(),
        "actor/ppo_kl": corrected.anchor - logprobs,
        "actor/behaviour_kl": drift.neg().clamp(max=MAX_LOG_RATIO).expm1() + drift,
        "actor/importance_weight": corrected.weight,
        "actor/importance_capped": corrected.capped.float(),
    }
    if settings.has_kl_term and tokens.reference is not None:
        divergence = ESTIMATES[settings.kl_estimator](tokens.logprobs, tokens.reference)
        if settings.kl_importance_weight:
            divergence = importance_weighted(divergence, tokens.logprobs, corrected.anchor)
        figures["actor/kl_loss"] = divergence
        token_losses = token_losses + settings.kl_coefficient * figures["actor/kl_loss"]
    if tokens.entropies is not None:
        figures["actor/entropy"] = tokens.entropies
        token_losses = token_losses - settings.entropy_coefficient * tokens.entropies
    figures[_WEIGHT] = torch.ones_like(tokens.weights)
    sums = {name: (figure.detach() * tokens.weights).sum() for name, figure in figures.items()}
    return LossTerms((token_losses * tokens.weights).sum(), sums)


def mean_figures(sums: dict[str, float]) -> dict[str, float]:
    """Return an update's figures from the sums over its micro-batches and ranks.

    ``LossTerms.sums`` are weighted as the loss is; the weights need not add up to 1 (``aggregation: constant``,
    sequences without a gradient).
    """
    total = sums[_WEIGHT] or 1.0
    as_they_are = {*_AGGREGATED, FIGURE, LIMIT_FIGURE}
    return {name: value if name in as_they_are else value / total for name, value in sums.items() if name != _WEIGHT}
