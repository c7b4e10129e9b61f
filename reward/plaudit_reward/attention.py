"""Compute causal attention over sequences concatenated in a single row, where each attends only to itself.

Registered with transformers under ``PACKED_ATTENTION``; the trainer and the reward model server compute with it. All
other operations work token by token, so a packed row ``[1, T]`` needs no padding there. For attention the sequences are
grouped into *blocks* of about the same length: each block is one ordinary causal call of
``scaled_dot_product_attention`` without a mask. In a causal call a token attends only to earlier ones, so no real token
attends to the few padding tokens behind a block's shorter sequences. The result is exact, needs no ``T x T`` mask, and
uses the fast kernels of CPU and GPU.

On GPUs torch's flash kernel for sequences of any lengths (``torch.nn.attention.varlen``, FlashAttention 2) needs
neither the padding of blocks nor, for sliding windows, a mask of a block's length squared. It is registered under
``VARLEN_ATTENTION``; ``choose_attention`` decides whether a model uses it. On Hopper and later GPUs long sequences are
computed each by itself there, because ``scaled_dot_product_attention`` calls cuDNN, whose kernel is faster.

Shape letters: T packed tokens, n sequences of a block, L its longest, H heads, K key/value heads, D head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from plaudit_wire.errors import described
from plaudit_wire.logs import get_logger

PACKED_ATTENTION = "plaudit_packed"
"""The ``attn_implementation`` of models that compute packed rows."""
SHORTEST_OF_LONGEST = 0.8
"""Default: a block ends before the first sequence shorter than this share of its longest; at most a fifth is padding.

This suits a GPU, where every call costs a launch. On a CPU padding costs more than calls: 1 makes blocks without any.
"""
LONG_TOKENS = 2048
"""Sequences from this length on are worth a call of cuDNN each, on GPUs where that is faster than the flash kernel.

Measured on an H100 (cuDNN ÷ flash, forward and backward): 0.56-0.65 at 8,192 tokens, 0.65-0.73 at 2,048. Shorter ones
of mixed lengths lose more by the number of calls.
"""
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "cache")
"""Arguments of attention variants that are not supported here; ignoring them would change the model's results."""


class UnsupportedAttentionError(Exception):
    """The model requests a kind of attention that is not supported for packed rows."""


@dataclass(frozen=True)
class AttentionBlock:
    """Hold consecutive sequences of about the same length."""

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
        return replace(self, padded=self.padded.to(device), packed=self.packed.to(device))


@dataclass(frozen=True)
class PackedLayout:
    """Lay out a packed row's sequences: by blocks, and for kernels that take sequences of any lengths."""

    blocks: tuple[AttentionBlock, ...]
    bounds: Tensor
    """int32[N + 1]: 0, then the end of each of the N sequences (``cu_seqlens``)."""
    longest: int
    """Tokens of the longest sequence."""
    long: tuple[AttentionBlock, ...]
    """The sequences of ``LONG_TOKENS`` and more, in blocks of equal lengths."""
    short_bounds: Tensor
    """``bounds`` of the others, which follow them."""
    short_longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], shortest_of_longest: float = SHORTEST_OF_LONGEST) -> PackedLayout:
        """Lay out a row of sequences with these numbers of tokens, longest first."""
        num_long = sum(length >= LONG_TOKENS for length in lengths)
        long, short = lengths[:num_long], lengths[num_long:]
        return cls(
            tuple(_blocks(lengths, shortest_of_longest)),
            _bounds(lengths),
            lengths[0],
            tuple(_blocks(long, 1.0)) if long else (),
            _bounds(short),
            short[0] if short else 0,
        )

    def to(self, device: torch.device) -> PackedLayout:
        """Return the same layout with its indices on a device."""
        return replace(
            self,
            blocks=tuple(block.to(device) for block in self.blocks),
            bounds=self.bounds.to(device),
            short_bounds=self.short_bounds.to(device),
        )


def _bounds(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


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


_Kernel = Callable[[Tensor, Tensor, Tensor, PackedLayout, float | None, int | None], Tensor]
Attention = Callable[..., tuple[Tensor, None]]


def _attention(kernel: _Kernel) -> Attention:
    """Return a kernel as the function that transformers' attention layers call."""

    def attend(
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
        """Compute attention within each sequence of a packed row.

        Args:
            query: float[1, H, T, D]; key and value: float[1, K, T, D].
            token_exchange: with processes that hold other tokens of the row; None: all T are here.
            scaling: factor of the scores; None: 1 ÷ √D.
            dropout: must be 0, so that the result is the model's.
            sliding_window: the number of tokens that a token attends to, including itself; None: all.
            **further: arguments of other models; see ``_UNSUPPORTED``.

        Returns:
            float[1, T, H, D], and no attention weights.

        Raises:
            UnsupportedAttentionError: the layer requests anything but plain causal attention.
        """
        asked = [name for name in _UNSUPPORTED if further.get(name) is not None]
        if asked or dropout or attention_mask is not None or not getattr(module, "is_causal", True):
            raise UnsupportedAttentionError(
                f"{type(module).__name__} ({', '.join(asked) or 'mask, dropout or not causal'})"
            )
        if token_exchange is not None:
            query, key, value = token_exchange.to_heads(query, key, value)
        row = kernel(query, key, value, packed_layout, scaling, sliding_window)
        return (row if token_exchange is None else token_exchange.to_tokens(row)).unsqueeze(0), None

    return attend


@_attention
def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """Compute attention block by block."""
    return torch.cat(_of_blocks(query, key, value, layout.blocks, scaling, sliding_window))


def _of_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Sequence[AttentionBlock],
    scaling: float | None,
    sliding_window: int | None,
) -> list[Tensor]:
    tokens = [block.num_tokens for block in blocks]
    outputs = []
    # Split once, not block by block: with many short sequences every call counts.
    rows = zip(blocks, *(torch.split(row, tokens, 2) for row in (query, key, value)), strict=True)
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
    return outputs


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
    """Yield parts of a model that treat a long row differently, and the sequence length up to which each is exact.

    Dynamic and LongRoPE position embeddings choose their frequencies by the longest sequence of a row; chunked
    attention would have to begin its chunks anew with each sequence.
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


VARLEN_ATTENTION = "plaudit_packed_varlen"
"""The ``attn_implementation`` of models that compute packed rows by this kernel."""
_LEAST_CAPABILITY = (8, 0)
_LARGEST_HEAD = 256
_LENGTHS = [70, 33, 5]
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
"""Earlier versions of torch (2.11) take fewer key/value heads without being asked."""
_TOLERANCE = 0.05
"""Largest difference of the two kernels in bfloat16, relative to the largest value."""


@_attention
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """Compute attention by torch's flash kernel, on a GPU, and that of long sequences by cuDNN where it is faster."""
    windowed = sliding_window is not None and sliding_window < layout.longest
    if windowed or not layout.long or not _has_fast_cudnn(query.device):
        window = sliding_window if windowed else None
        return _flash(query, key, value, layout.bounds, layout.longest, scaling, window)
    num_long = sum(block.num_tokens for block in layout.long)
    outputs = _of_blocks(
        query[:, :, :num_long], key[:, :, :num_long], value[:, :, :num_long], layout.long, scaling, None
    )
    if layout.short_longest:
        query, key, value = query[:, :, num_long:], key[:, :, num_long:], value[:, :, num_long:]
        outputs.append(_flash(query, key, value, layout.short_bounds, layout.short_longest, scaling, None))
    return torch.cat(outputs)


@functools.cache
def _has_fast_cudnn(device: torch.device) -> bool:
    """Return True for GPUs on which ``scaled_dot_product_attention`` prefers cuDNN."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scaling: float | None, window: int | None
) -> Tensor:
    output = varlen_attn(
        _rows(query),
        _rows(key),
        _rows(value),
        bounds,
        bounds,
        longest,
        longest,
        scale=scaling,
        # Flash counts the tokens before a token, transformers the token itself as well.
        window_size=(window - 1 if window else -1, 0),
        **(_GROUPED if key.shape[1] != query.shape[1] else {}),
    )
    assert isinstance(output, Tensor)
    return output


def _rows(part: Tensor) -> Tensor:
    """Return float[1, H, T, D] as [T, H, D], in autocast's type: autocast does not know this operation."""
    kind = part.device.type
    row = part[0].transpose(0, 1)
    return row.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else row


def choose_attention(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
    """Let a model on a GPU use the kernel, if it supports the model and agrees with blocks on a short row.

    Otherwise the model keeps blocks, and one line of the log says why; a warning, if its sliding windows need masks.
    """
    if device.type != "cuda":
        return
    logger = get_logger(__name__)
    problem = problem_of(model, device, dtype)
    if not problem:
        whole = model.config.get_text_config() is model.config
        # A vision tower beside the language model keeps its own attention, which is not causal.
        model.set_attn_implementation(VARLEN_ATTENTION if whole else {"text_config": VARLEN_ATTENTION})
    elif windows := sliding_windows(model):
        logger.warning(
            "sliding windows are computed with masks of the square of a sequence's length",
            window=windows,
            reason=problem,
        )
    else:
        logger.info("attention is computed in blocks of padded sequences", reason=problem)


def problem_of(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> str:
    """Return why the kernel cannot compute a model on a GPU, or differs from blocks on a short row; empty: neither."""
    config: Any = model.config.get_text_config()
    heads = int(config.num_attention_heads)
    key_value_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    problem = refusal(torch.cuda.get_device_capability(device), dtype, head_size)
    return problem or disagreement(device, dtype, (heads, key_value_heads, head_size))


def refusal(capability: tuple[int, int], dtype: torch.dtype, head_size: int) -> str:
    """Return why the kernel cannot compute a model on a GPU; empty: it can."""
    if capability < _LEAST_CAPABILITY:
        return f"the kernel needs compute capability 8.0, the GPU has {capability[0]}.{capability[1]}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the kernel computes in bfloat16 and float16, the model in {str(dtype).removeprefix('torch.')}"
    if head_size > _LARGEST_HEAD or head_size % 8:
        return f"the kernel takes heads of a multiple of 8 up to {_LARGEST_HEAD}, the model's have {head_size}"
    return ""


@torch.inference_mode(False)  # in which reward models are loaded, and tensors have no gradients
@torch.enable_grad()
def disagreement(device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int]) -> str:
    """Compare the kernel with blocks on a short row, with and without a window; return the problem, or nothing.

    ``sizes``: heads, key/value heads, head size.
    """
    for window in (None, 16):
        try:
            expected = _outcome(packed_attention, device, dtype, sizes, window)
            found = _outcome(varlen_attention, device, dtype, sizes, window)
        # A kernel that was not built for this GPU raises what its library raises.
        except Exception as error:
            return f"the kernel failed: {described(error)}"
        for own, other in zip(found, expected, strict=True):
            apart = float((own.float() - other.float()).abs().max() / other.float().abs().max())
            if not apart <= _TOLERANCE:
                return f"its results differ by {apart:.2g} from those of blocks"
    return ""


def _outcome(
    attention: Attention, device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int], window: int | None
) -> list[Tensor]:
    """Return output and gradients of one kernel on a random row, the same for each."""
    heads, key_value_heads, head_size = sizes
    random = torch.Generator().manual_seed(0)
    parts = [
        torch.randn(1, number, sum(_LENGTHS), head_size, generator=random).to(device, dtype).requires_grad_()
        for number in (heads, key_value_heads, key_value_heads)
    ]
    layout = PackedLayout.of(_LENGTHS).to(device)
    output, _ = attention(torch.nn.Identity(), *parts, None, packed_layout=layout, sliding_window=window)
    return [output.detach(), *torch.autograd.grad(output.float().square().sum(), parts)]


def sliding_windows(model: PreTrainedModel) -> list[int]:
    """Return the different windows of a model's layers, in tokens."""
    found = {getattr(module, "sliding_window", None) for module in model.modules()}
    return sorted(window for window in found if isinstance(window, int))


AttentionInterface.register(VARLEN_ATTENTION, varlen_attention)
