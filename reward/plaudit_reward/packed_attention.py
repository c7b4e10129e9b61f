"""Compute causal attention over sequences concatenated in a single row, where each attends only to itself.

Registered with transformers under ``PACKED_ATTENTION``; the trainer and the reward model server compute with it.
All other operations work token by token, so a packed row ``[1, T]`` needs no padding there. For attention the
sequences are grouped into *blocks* of about the same length: each block is one ordinary causal call of
``scaled_dot_product_attention`` without a mask. In a causal call a token attends only to earlier ones, so no real token
attends to the few padding tokens behind a block's shorter sequences. The result is exact, needs no ``T x T`` mask, and
uses the fast kernels of CPU and GPU.

Shape letters: T packed tokens, n sequences of a block, L its longest, H heads, K key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

PACKED_ATTENTION = "plaudit_packed"
"""The ``attn_implementation`` of models that compute packed rows."""

SHORTEST_OF_LONGEST = 0.8
"""Default: a block ends before the first sequence shorter than this share of its longest; at most a fifth is padding.

This suits a GPU, where every call costs a launch. On a CPU padding costs more than calls: 1 makes blocks without any.
"""

_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "cache")
"""Arguments of attention variants that are not supported here; ignoring them would change the model's results."""


class UnsupportedAttentionError(Exception):
    """The model requests a kind of attention that is not supported for packed rows."""


@dataclass(frozen=True)
class AttentionBlock:
    """Consecutive sequences of about the same length."""

    num_tokens: int
    num_sequences: int
    longest: int
    padded: Tensor | None
    """int64[n · L]: the block's token at each position of the padded block. None: all sequences are equally long."""
    packed: Tensor | None
    """int64[num_tokens]: each token's position in the padded block."""

    def to(self, device: torch.device) -> AttentionBlock:
        """Return the same block with its indices on a device."""
        if self.padded is None or self.packed is None:
            return self
        sizes = (self.num_tokens, self.num_sequences, self.longest)
        return AttentionBlock(*sizes, self.padded.to(device), self.packed.to(device))


@dataclass(frozen=True)
class PackedLayout:
    """The places of a packed row's sequences: by blocks, and for kernels that take sequences of any lengths."""

    blocks: tuple[AttentionBlock, ...]
    bounds: Tensor
    """int32[N + 1]: 0, then the end of each of the N sequences (``cu_seqlens``)."""
    longest: int
    """Tokens of the longest sequence."""

    @classmethod
    def of(cls, lengths: Sequence[int], shortest_of_longest: float = SHORTEST_OF_LONGEST) -> PackedLayout:
        """Lay out a row of sequences with these numbers of tokens, longest first."""
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(tuple(_blocks(lengths, shortest_of_longest)), bounds, lengths[0])

    def to(self, device: torch.device) -> PackedLayout:
        """Return the same layout with its indices on a device."""
        return PackedLayout(tuple(block.to(device) for block in self.blocks), self.bounds.to(device), self.longest)


def _blocks(lengths: Sequence[int], shortest_of_longest: float) -> Iterator[AttentionBlock]:
    starts = [0]
    for number, length in enumerate(lengths):
        if length < shortest_of_longest * lengths[starts[-1]]:
            starts.append(number)
    return (_block(lengths[start:end]) for start, end in pairwise([*starts, len(lengths)]))


def _block(lengths: Sequence[int]) -> AttentionBlock:
    longest, total = lengths[0], sum(lengths)
    if all(length == longest for length in lengths):
        return AttentionBlock(total, len(lengths), longest, None, None)
    ends = torch.tensor(lengths)
    starts = ends.cumsum(0) - ends
    place = torch.arange(longest).expand(len(lengths), longest)
    # Padding repeats a sequence's last token: any token would do, since no real one attends to it.
    padded = starts[:, None] + torch.minimum(place, ends[:, None] - 1)
    packed = torch.nonzero((place < ends[:, None]).flatten()).squeeze(1)
    return AttentionBlock(total, len(lengths), longest, padded.flatten(), packed)


class TokenExchange(Protocol):
    """Give a process the tokens of other processes that hold the rest of the row, for a share of the heads."""

    def to_heads(self, *parts: Tensor) -> list[Tensor]:
        """Return all tokens of the process's heads: float[1, H, own tokens, D] → float[1, own heads, T, D] each."""

    def to_tokens(self, output: Tensor) -> Tensor:
        """Return all heads of the process's tokens: float[T, own heads, D] → float[own tokens, H, D]."""


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_layout: PackedLayout,
    token_exchange: TokenExchange | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **further: Any,
) -> tuple[Tensor, None]:
    """Compute attention within each sequence of a packed row; called by transformers' attention layers.

    Args:
        query: float[1, H, T, D].
        key: float[1, K, T, D].
        value: float[1, K, T, D].
        token_exchange: with processes that hold other tokens of the row; None: all T are here.
        scaling: factor of the scores; None: 1 ÷ √D.
        dropout: must be 0, so that the result is the model's.
        sliding_window: the number of tokens that a token attends to, including itself; None: all.
        **further: arguments of other models; see ``_UNSUPPORTED``.

    Returns:
        float[1, T, H, D], and no attention weights.

    Raises:
        UnsupportedAttentionError: the layer requests another kind of attention.
    """
    refuse_other_attention(module, attention_mask, dropout, further)
    if token_exchange is not None:
        query, key, value = token_exchange.to_heads(query, key, value)
    tokens = [block.num_tokens for block in packed_layout.blocks]
    outputs = []
    # Split once, not block by block: with many short sequences every call counts.
    rows = zip(packed_layout.blocks, *(torch.split(row, tokens, 2) for row in (query, key, value)), strict=True)
    for block, queries, keys, values in rows:
        mask = _window_mask(block.longest, sliding_window, query.device)
        output = scaled_dot_product_attention(
            _padded(queries, block),
            _padded(keys, block),
            _padded(values, block),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        outputs.append(_packed(output, block))
    row = torch.cat(outputs)
    return (row if token_exchange is None else token_exchange.to_tokens(row)).unsqueeze(0), None


def refuse_other_attention(
    module: torch.nn.Module, attention_mask: Tensor | None, dropout: float, further: Mapping[str, Any]
) -> None:
    """Raise ``UnsupportedAttentionError`` unless a layer requests plain causal attention."""
    asked = [name for name in _UNSUPPORTED if further.get(name) is not None]
    if asked or dropout or attention_mask is not None or not getattr(module, "is_causal", True):
        raise UnsupportedAttentionError(
            f"{type(module).__name__} ({', '.join(asked) or 'mask, dropout or not causal'})"
        )


def _padded(part: Tensor, block: AttentionBlock) -> Tensor:
    """Pad a block: float[1, H, tokens of the block, D] → float[n, H, L, D]."""
    if block.num_sequences == 1:
        return part
    if block.padded is not None:
        part = part.index_select(2, block.padded)
    return part.view(part.shape[1], block.num_sequences, block.longest, -1).transpose(0, 1)


def _packed(output: Tensor, block: AttentionBlock) -> Tensor:
    """Remove a block's padding: float[n, H, L, D] → float[tokens of the block, H, D]."""
    row = output.transpose(1, 2).flatten(0, 1)
    return row if block.packed is None else row.index_select(0, block.packed)


def _window_mask(longest: int, sliding_window: int | None, device: torch.device) -> Tensor | None:
    """Return a mask bool[L, L] if the window is shorter than the block; else None (plain causal)."""
    if sliding_window is None or sliding_window >= longest:
        return None
    places = torch.arange(longest, device=device)
    distance = places[:, None] - places[None, :]
    return (distance >= 0) & (distance < sliding_window)


def length_limits(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """Yield parts of a model that treat a long row differently from the sequences in it.

    Dynamic and LongRoPE position embeddings choose their frequencies by the longest sequence of a row; chunked
    attention would have to begin its chunks anew with each sequence.

    Yields:
        The part's name, and the tokens of a sequence up to which the packed result is exact.
    """
    config: Any = model.config.get_text_config()
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer, kind in by_layer.items():
            if kind == "longrope" or "dynamic" in (kind or ""):
                rope = config.rope_parameters if layer is None else config.rope_parameters[layer]
                limit = rope.get("original_max_position_embeddings") or config.max_position_embeddings
                yield f"{kind} position embeddings", int(limit)
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        yield "chunked attention", int(config.attention_chunk_size)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
