"""DAPO's soft overlong punishment: a response in the last ``buffer_tokens`` loses reward for each token.

Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", equation 13; as verl computes it::

    value = min(0, -(response_tokens - (max_tokens - buffer_tokens)) / buffer_tokens * penalty_factor)

It is 0 up to ``max_tokens - buffer_tokens`` and ``-penalty_factor`` at ``max_tokens``. Make it a separate scorer:
the weighted sum adds it to the others' values.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from plaudit_reward.score import Score
from plaudit_wire.errors import DataError
from plaudit_wire.sample import Sample


def overlong(
    sample: Sample,
    *,
    buffer_tokens: Annotated[int, Meta(ge=1)],
    max_tokens: Annotated[int, Meta(ge=1)] | None = None,
    penalty_factor: Annotated[float, Meta(ge=0)] = 1.0,
) -> Score:
    """Return 0 or less; the extra ``overlong`` is 1 if the response ran into the buffer, else 0.

    Args:
        max_tokens: length of the longest response; None: the sample's ``max_tokens`` (``rollout.sampling.maxTokens``).
        penalty_factor: loss of the longest response.

    Raises:
        DataError: the longest response is unknown, or shorter than the buffer.
    """
    longest = sample.max_tokens if max_tokens is None else max_tokens
    if longest < buffer_tokens:
        raise DataError(
            f"the longest response has {longest} tokens, the buffer {buffer_tokens}: set overlong's maxTokens to the "
            "longest response, or its bufferTokens to less"
        )
    exceeding = sample.response_tokens - (longest - buffer_tokens)
    value = min(0.0, -exceeding / buffer_tokens * penalty_factor)
    return Score.scored(value, overlong=float(value < 0))
