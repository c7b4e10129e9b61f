"""Measure an update's speed: tokens a second, and on GPUs the share of the peak (MFU). Pure but for the name.

MFU counts 6 operations a trained parameter and token (2 forward, 2 for the gradient of its input, 2 for its own), 4 a
frozen one, and 6 · layers · width · length for causal attention: what the update needs, without what checkpointing
computes again (Chowdhery et al., 2022, arXiv 2204.02311).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from plaudit_workers.job.sizing.devices import find_device
from plaudit_workers.job.sizing.shape import ModelShape

_TOKENS = "training/computed_tokens"
_TFLOPS = "training/tflops"


def training_flops(shape: ModelShape, lengths: Sequence[int], adapters: int | None = None) -> float:
    """Return the operations of one forward and backward pass.

    Args:
        lengths: tokens of each sequence, prompts included.
        adapters: parameters of the adapters, beside which the model's own are frozen; None: these are trained.
    """
    matrices = 6 * shape.active_parameters if adapters is None else 4 * shape.active_parameters + 6 * adapters
    attention = 6 * shape.layers * shape.heads * shape.head_size
    return float(sum(length * (matrices + attention * length) for length in lengths))


def work_figures(shape: ModelShape | None, lengths: Sequence[int], adapters: int | None = None) -> dict[str, float]:
    """Return ``training/computed_tokens``, and ``training/tflops`` of a known form of model."""
    figures = {_TOKENS: float(sum(lengths))}
    return figures if shape is None else figures | {_TFLOPS: training_flops(shape, lengths, adapters) / 1e12}


def speed_figures(
    work: Mapping[str, float], seconds: float, ranks: int = 1, peak: float | None = None
) -> dict[str, float]:
    """Return ``actor/tokens_per_s``, and ``perf/mfu/actor`` (verl's name) where the peak is known.

    Args:
        work: an update's figures; without computed tokens there are no figures.
        ranks: GPUs that shared it.
        peak: dense operations a second of one; None on a CPU.
    """
    if not work.get(_TOKENS) or seconds <= 0:
        return {}
    figures = {"actor/tokens_per_s": work[_TOKENS] / seconds}
    if peak and _TFLOPS in work:
        figures["perf/mfu/actor"] = work[_TFLOPS] * 1e12 / (seconds * ranks * peak)
    return figures


def peak_flops() -> float | None:
    """Return the dense bfloat16 operations a second of this process's GPU; None on a CPU or an unknown GPU."""
    if not torch.cuda.is_available():
        return None
    device = find_device(torch.cuda.get_device_name())
    return device.flops if device else None
