"""Weigh the losses of tokens, which add up to the loss of an update: ``loss.aggregation``.

| ``loss.aggregation`` | verl's ``loss_agg_mode`` | weight of a token of sequence i |
| --- | --- | --- |
| ``token`` | ``token-mean`` | 1 ÷ N |
| ``sequence`` | ``seq-mean-token-mean`` | 1 ÷ (S · T_i) |
| ``constant`` | ``seq-mean-token-sum-norm`` | 1 ÷ (S · maxTokens) |

S sequences of the update, T_i trained tokens of sequence i, N = Σ T_i. Only ``constant`` gives a token the same weight
whatever the lengths, its own and the others': Liu et al. 2025, Dr. GRPO (arXiv 2503.20783).
"""

from __future__ import annotations

from collections.abc import Sequence


def token_weights(aggregation: str, lengths: Sequence[int], max_tokens: int) -> list[float]:
    """Return the aggregation weight of each sequence's tokens.

    Args:
        lengths: trained tokens of each sequence of the update, all at least 1.
        max_tokens: read by ``constant`` only.

    Returns:
        One weight a sequence; but for ``constant``, the weights of all tokens sum to 1.
    """
    if aggregation == "token":
        return [1 / sum(lengths)] * len(lengths)
    if aggregation == "constant":
        return [1 / (len(lengths) * max_tokens)] * len(lengths)
    return [1 / (len(lengths) * length) for length in lengths]
