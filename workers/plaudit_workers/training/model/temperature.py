"""Compute log-probabilities of the sampling distribution from logits; refuse sampling that cannot be trained on.

The rollout keeps log-probabilities under the distribution it drew from: logits divided by the temperature. The trainer
does the same, so that both describe the same policy. Sampling that cuts the distribution (``topP`` < 1, ``topK``) gives
every cut token the probability 0, and the set of cut tokens depends on the weights: the trainer's weights cut others
than the rollout's, so a sampled token may have no probability at all. Such sampling is refused, not approximated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plaudit_workers.job.spec.rollout import SamplingSpec
from plaudit_workers.process import RefusedError


def refuse_cut_sampling(sampling: SamplingSpec) -> None:
    """Check that the trainer can compute the distribution of the training samples.

    Raises:
        RefusedError: temperature 0, ``topP`` below 1 or ``topK`` given.
    """
    if sampling.temperature <= 0:
        raise RefusedError(
            f"rollout.sampling.temperature is {sampling.temperature}: all samples of a group would be equal; "
            "give a value above 0 (1.0 is the policy itself)"
        )
    if sampling.top_p < 1 or sampling.top_k > 0:
        raise RefusedError(
            f"rollout.sampling has topP {sampling.top_p} and topK {sampling.top_k}: the trainer cannot compute the "
            "probabilities of a cut distribution; set topP: 1.0 and topK: -1 (validation may sample as it likes)"
        )


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Return the log-probability of each target token: ``log_softmax(logits ÷ temperature)[target]``.

    Args:
        logits: float[R, V], any precision; computed in float32.
        targets: int64[R].
        temperature: > 0.

    Returns:
        float32[R].
    """
    scaled = logits.float() / temperature
    chosen = scaled.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return chosen - scaled.logsumexp(-1)


def token_entropies(logits: Tensor, temperature: float) -> Tensor:
    """Return each token's entropy in nats at the temperature: ``logsumexp(z) - Σ_v softmax(z)_v · z_v``.

    Args:
        logits: float[R, V].
        temperature: > 0.

    Returns:
        float32[R].
    """
    scaled = logits.float() / temperature
    return scaled.logsumexp(-1) - (torch.softmax(scaled, -1) * scaled).sum(-1)
