"""Hold inputs and results of a policy loss, token by token: passed by ``policy_model``, read by every loss here.

Shapes: R trained tokens of a micro-batch, which are those of S whole sequences, one behind another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenInputs:
    """Hold inputs of the loss for each trained token of a micro-batch; all float32[R] but ``lengths``."""

    logprobs: Tensor
    """log π_θ, with gradient."""
    proximal: Tensor
    """log π_prox (see ``correction``)."""
    behaviour: Tensor
    """log μ."""
    advantages: Tensor
    weights: Tensor
    """Aggregation weights."""
    lengths: Tensor
    """int64[S]: trained tokens of each sequence; their sum is R."""
    entropies: Tensor | None = None
    """Entropy of the token's distribution, with gradient; needed when ``entropyCoefficient`` is not 0."""
    reference: Tensor | None = None
    """log π_ref of the starting weights; needed when ``klCoefficient`` is not 0."""


@dataclass(frozen=True)
class TokenLosses:
    """Hold policy-gradient losses before importance weights and aggregation, one value a token."""

    losses: Tensor
    """float32[R], with gradient."""
    clipped: Tensor
    """bool[R]: the clip stopped the token's gradient, or cut its weight."""
    bounded: Tensor
    """bool[R]: a bound on the ratio besides the clip acted (dual clip, truncation)."""


def sequence_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Return each token's sum of its sequence: float32[R].

    Args:
        values: float32[R].
        lengths: int64[S].
    """
    owners = torch.repeat_interleave(torch.arange(lengths.numel(), device=values.device), lengths.to(values.device))
    sums = torch.zeros(lengths.numel(), dtype=values.dtype, device=values.device).index_add(0, owners, values)
    return sums[owners]


def sequence_means(values: Tensor, lengths: Tensor) -> Tensor:
    """Return each token's mean of its sequence: float32[R]."""
    own = lengths.to(values.device)
    return sequence_sums(values, lengths) / torch.repeat_interleave(own, own)
