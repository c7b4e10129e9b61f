"""Choose what layers keep for their gradients: checkpointing, and offload of what it keeps.

Called by ``policy_model`` before the layers are sharded, so that the second forward pass finds gathered weights.
Checkpointing keeps the input of each layer and computes the layer again. With
Qwen2.5-7B's sizes in bfloat16 a token keeps 0.2 MB in place of 7 MB; the second pass costs a third more time.
``selective`` also keeps the output of attention, whose cost grows with the square of the length, at 0.2 MB more.
Offload moves the inputs of layers to pinned host memory until the backward pass needs them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.attention.varlen
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

Checkpointing = Literal["auto", "none", "layers", "selective"]

_ATTENTION = (
    *(
        getattr(torch.ops.aten, name).default
        for name in (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
        )
    ),
    torch.ops.torch_attn._varlen_attn.default,  # registered by ``torch.nn.attention.varlen``
)


def checkpoint_layers(
    model: PreTrainedModel, kind: Checkpointing, device: torch.device, *, offload: bool = False
) -> None:
    """Compute a model's layers a second time in the backward pass.

    Args:
        model: layers are those that it names as not to be split.
        kind: ``trainer.activationCheckpointing``; ``auto`` is ``layers`` on a GPU and ``none`` on a CPU.
        offload: ``trainer.activationOffload``, for ``layers`` only; without effect on a CPU.
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
            forward = functools.partial(
                checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False, **further
            )
            module.forward = functools.partial(_offloaded, forward) if offload and device.type != "cpu" else forward


def _offloaded(forward: Callable[..., Any], *arguments: Any, **further: Any) -> Any:
    """Call a checkpointed layer, and keep what it saves, its inputs, in host memory.

    Operations inside the layer save nothing here: the hooks of ``checkpoint`` drop what they would save.
    """
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return forward(*arguments, **further)


def _policy(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE
