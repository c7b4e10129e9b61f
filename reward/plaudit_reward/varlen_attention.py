"""Compute attention of packed rows on GPUs by torch's flash kernel for sequences of any lengths.

It needs neither the padding of ``packed_attention``'s blocks nor, for sliding windows, a mask of a block's length
squared. Registered with transformers under ``VARLEN_ATTENTION``; ``choose_attention`` decides whether a model uses it.
The kernel (``torch.nn.attention.varlen``, FlashAttention 2) exists for GPUs only.

Shape letters as in ``packed_attention``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

from plaudit_reward.packed_attention import PackedLayout, TokenExchange, packed_attention, refuse_other_attention

VARLEN_ATTENTION = "plaudit_packed_varlen"
"""The ``attn_implementation`` of models that compute packed rows by this kernel."""

_LEAST_CAPABILITY = (8, 0)
_LARGEST_HEAD = 256
_LENGTHS = [70, 33, 5]
_TOLERANCE = 0.05
"""Largest difference of the two kernels in bfloat16, relative to the largest value."""


def varlen_attention(
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
    """Compute what ``packed_attention`` computes, with its arguments and results, on a GPU."""
    refuse_other_attention(module, attention_mask, dropout, further)
    if token_exchange is not None:
        query, key, value = token_exchange.to_heads(query, key, value)
    windowed = sliding_window is not None and sliding_window < packed_layout.longest
    bounds, longest = packed_layout.bounds, packed_layout.longest
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
        window_size=(sliding_window - 1 if windowed and sliding_window else -1, 0),
        enable_gqa=key.shape[1] != query.shape[1],
    )
    assert isinstance(output, Tensor)
    return (output if token_exchange is None else token_exchange.to_tokens(output)).unsqueeze(0), None


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
    from plaudit_wire.logs import get_logger  # structlog, which benchmarks/gpu does without

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


def disagreement(device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int]) -> str:
    """Compare the kernel with blocks on a short row, with and without a window; return the problem, or nothing.

    Args:
        sizes: heads, key/value heads, head size.
    """
    for window in (None, 16):
        try:
            expected = _outcome(packed_attention, device, dtype, sizes, window)
            found = _outcome(varlen_attention, device, dtype, sizes, window)
        # A kernel that was not built for this GPU raises what its library raises.
        except Exception as error:
            return f"the kernel failed: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        for own, other in zip(found, expected, strict=True):
            apart = float((own.float() - other.float()).abs().max() / other.float().abs().max())
            if not apart <= _TOLERANCE:
                return f"its results differ by {apart:.2g} from those of blocks"
    return ""


def _outcome(
    attention: Callable[..., tuple[Tensor, None]],
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    window: int | None,
) -> list[Tensor]:
    """Return output and gradients of one kernel on a random row, the same for each."""
    heads, key_value_heads, head_size = sizes
    random = torch.Generator().manual_seed(0)
    parts = [
        torch.randn(1, number, sum(_LENGTHS), head_size, generator=random).to(device, dtype).requires_grad_()
        for number in (heads, key_value_heads, key_value_heads)
    ]
    layout = PackedLayout.of(_LENGTHS).to(device)
    with torch.enable_grad():
        output, _ = attention(torch.nn.Identity(), *parts, None, packed_layout=layout, sliding_window=window)
        return [output.detach(), *torch.autograd.grad(output.float().square().sum(), parts)]


def sliding_windows(model: PreTrainedModel) -> list[int]:
    """Return the different windows of a model's layers, in tokens."""
    found = {getattr(module, "sliding_window", None) for module in model.modules()}
    return sorted(window for window in found if isinstance(window, int))


AttentionInterface.register(VARLEN_ATTENTION, varlen_attention)
