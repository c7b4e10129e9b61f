"""Compute logits of sequences concatenated in a single row: no padding, no mask.

For decoders with a ``score`` head on a sequence's last token, if ``packed_attention`` supports their attention. A check
when the model is loaded decides this and compares the results; the model's name does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification

from plaudit_reward.packed_attention import PACKED_ATTENTION, SHORTEST_OF_LONGEST, PackedLayout, length_limits
from plaudit_reward.varlen_attention import choose_attention
from plaudit_wire.logs import get_logger

logger = get_logger(__name__)

_SAME = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""The largest rounding difference of packed hidden states from those of a sequence alone, relative to their norm."""

_NO_LEAK = 1e-5
"""The largest change with the tokens before a sequence, in any precision: two rows of the same lengths round alike.
Otherwise a state-space layer's leak of 0.2 % would pass as bfloat16's rounding."""


@torch.inference_mode()
def enable_packing(model: PreTrainedModel) -> bool:
    """Switch a model to the packed attention, unless that would change its results; return True if it has."""
    if not isinstance(model, GenericForSequenceClassification):
        return False
    for part, limit in length_limits(model):
        logger.info("sequences cannot be packed", reason=f"{part} depend on the longest sequence above {limit} tokens")
        return False
    own = model.config._attn_implementation
    vocabulary = int(model.config.get_text_config().vocab_size)
    probe, one, other = ([number % vocabulary for number in range(start, start + 12)] for start in (1, 20, 40))
    body: Any = model.base_model
    alone = body(input_ids=_row(probe, model), use_cache=False).last_hidden_state[0]
    try:
        model.set_attn_implementation(PACKED_ATTENTION)
        choose_attention(model, model.device, model.dtype)
        behind_one, behind_other = (_hidden(model, [before, probe])[12:] for before in (one, other))
        problem = _difference(alone, behind_one, behind_other)
    except Exception as error:  # the model's code may not support packed rows
        problem = f"{type(error).__name__}: {error}"
    if problem:
        logger.info("sequences cannot be packed: %s", problem)
        model.set_attn_implementation(own)
    return not problem


def _difference(alone: Tensor, behind_one: Tensor, behind_other: Tensor) -> str:
    """Return the reason why a sequence behind two others has different hidden states; empty: they are equal."""
    leak, apart = _distance(behind_one, behind_other), _distance(behind_one, alone)
    if not leak <= _NO_LEAK:
        return f"hidden states move by {leak:.2g} with what lies before"
    return "" if apart <= _SAME[alone.dtype] else f"hidden states move by {apart:.2g}"


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


@torch.inference_mode()
def packed_logits(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Return the logits of each sequence, in order, from one forward pass with packing enabled: float[n, labels]."""
    order = sorted(range(len(sequences)), key=lambda number: -len(sequences[number]))
    lying = [sequences[number] for number in order]
    hidden = _hidden(model, lying)
    pad_id = model.config.get_text_config().pad_token_id
    ends = accumulate(map(len, lying))
    read = [end - len(tokens) + _read_token(tokens, pad_id) for end, tokens in zip(ends, lying, strict=True)]
    head: Any = model.score
    logits: Tensor = head(hidden[torch.tensor(read, device=hidden.device)])
    return logits[torch.tensor(order).argsort()]


def _hidden(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Return the hidden states of all tokens, float[T, width], of sequences sorted longest first."""
    lengths = [len(tokens) for tokens in sequences]
    layout = PackedLayout.of(lengths, 1 if model.device.type == "cpu" else SHORTEST_OF_LONGEST)
    body: Any = model.base_model
    hidden: Tensor = body(
        input_ids=_row([token for tokens in sequences for token in tokens], model),
        position_ids=_row([place for length in lengths for place in range(length)], model),
        packed_layout=layout.to(model.device),
        use_cache=False,
    ).last_hidden_state[0]
    return hidden


def _row(numbers: list[int], model: PreTrainedModel) -> Tensor:
    return torch.tensor([numbers], device=model.device)


def _read_token(tokens: Sequence[int], pad_id: int | None) -> int:
    """Return the position that transformers reads: a sequence's last token that is not the padding token.

    This is not always the last token: with some tokenizers the end-of-text token is the padding token.
    """
    place = len(tokens) - 1
    while place and tokens[place] == pad_id:
        place -= 1
    return place
