"""Refuse sampling that cannot be trained on.

The rollout keeps log-probabilities under the distribution it drew from: logits divided by the temperature. The trainer
does the same (``token_head``), so that both describe the same policy. Sampling that cuts the distribution (``topP``
below 1, ``topK``) gives every cut token the probability 0, and the set of cut tokens depends on the weights: the
trainer's weights cut others than the rollout's, so a sampled token may have no probability at all. Such sampling is
refused, not approximated.
"""

from __future__ import annotations

from plaudit_wire.errors import RefusedError
from plaudit_workers.job.spec.rollout import SamplingSpec


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
