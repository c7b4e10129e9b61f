"""Measure whether rollouts sample from the published weights: one figure per step. Called by ``policy_model``.

A token that was sampled by the policy whose log-probabilities the trainer has must have the same
log-probability on both sides, but for the kernels' rounding. Tokens of older policies differ rightly and are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from plaudit_wire.messages import PolicyVersion
    from plaudit_workers.training.model.batches.batch import TrainingSequence

FIGURE = "actor/logprob_mismatch"
"""Mean absolute difference in nats over the tokens of samples that the published policy wrote from first to last."""
LIMIT_FIGURE = "actor/logprob_mismatch_limit"
"""The largest such difference that the precision explains, in nats."""
_TOKENS = "actor/logprob_mismatch_tokens"


def mismatch_sums(
    sequences: Sequence[TrainingSequence], version: PolicyVersion | None, published: Tensor, behaviour: Tensor
) -> dict[str, Tensor]:
    """Return a micro-batch's contribution to the figure.

    Args:
        sequences: of the micro-batch, in the order in which they lie; none where it only keeps a rank busy.
        version: the published policy's; None if it is not available.
        published: float32[R], its log-probabilities of the trained tokens.
        behaviour: float32[R], those that came with the samples.
    """
    tokens = torch.zeros_like(behaviour)
    if sequences and version is not None:
        written = [all(span[1] == version for span in sequence.version_spans) for sequence in sequences]
        counts = torch.tensor([sequence.num_trained_tokens for sequence in sequences])
        tokens = torch.tensor(written).repeat_interleave(counts).to(tokens)
    return {FIGURE: ((published - behaviour).abs() * tokens).sum(), _TOKENS: tokens.sum()}


def mismatch_figures(sums: dict[str, float], limit: float) -> dict[str, float]:
    """Replace the two sums by their quotient, with the limit beside it; without such tokens there is neither.

    Args:
        limit: largest difference that the precision explains, in nats.
    """
    figures = dict(sums)
    total, num_tokens = figures.pop(FIGURE, 0.0), figures.pop(_TOKENS, 0.0)
    return figures | ({FIGURE: total / num_tokens, LIMIT_FIGURE: limit} if num_tokens else {})
