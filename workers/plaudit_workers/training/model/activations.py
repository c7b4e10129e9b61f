"""Activation checkpointing: keep the input of each layer and compute the layer again for its gradient.

Called by ``policy_model`` before the layers are sharded, so that the second forward pass finds gathered weights. With
Qwen2.5-7B's sizes in bfloat16 a token keeps 0.2 MB in place of 7 MB; the second pass costs a third more time.
``selective`` also keeps the output of attention, whose cost grows with the square of the length, at 0.2 MB more.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

Checkpointing = Literal["auto", "none", "layers", "selective"]

_ATTENTION = tuple(
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
)


def checkpoint_layers(model: PreTrainedModel, kind: Checkpointing, device: torch.device) -> None:
    """Compute a model's layers a second time in the backward pass.

    Args:
        model: its layers are those that it names as not to be split.
        kind: ``trainer.activationCheckpointing``; ``auto`` is ``layers`` on a GPU and ``none`` on a CPU.
        device: on which the model trains.
    """
    if kind == "auto":
        kind = "none" if device.type == "cpu" else "layers"
    if kind == "none":
        return
    further: dict[str, Any] = {}
    if kind == "selective":
        further["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    for module in model.modules():
        if type(module).__name__ in (model._no_split_modules or ()):
            module.forward = functools.partial(
                checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False, **further
            )


def _policy(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE
