"""Choose what layers keep for their gradients, and compile them, before the model is sharded.

Checkpointing keeps the input of each layer and computes the layer again, with gathered weights. With Qwen2.5-7B's sizes
in bfloat16 a token keeps 0.2 MB in place of 7 MB; the second pass costs a third more time. ``selective`` also keeps the
output of attention, whose cost grows with the square of the length, at 0.2 MB more. Offload moves the inputs of layers
to pinned host memory until the backward pass needs them.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.attention.varlen
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import AttentionInterface, PreTrainedModel

from plaudit_reward.attention import PACKED_ATTENTION, VARLEN_ATTENTION, packed_attention, varlen_attention
from plaudit_wire.errors import RefusedError

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


def refuse_without_compiler(device: str, environment: Mapping[str, str]) -> None:
    """Check for the programs with which torch builds what it compiles.

    Args:
        environment: ``PATH``, ``CXX`` and ``CC`` are read, as torch and Triton do.
    """
    if device == "cpu":
        names = [environment.get("CXX", "g++")]
    else:
        names = [environment["CC"]] if "CC" in environment else ["gcc", "clang", "cc"]
    if not any(shutil.which(name.split()[0], path=environment.get("PATH")) for name in names):
        raise RefusedError(
            f"spec.trainer.compile needs a compiler, and {' or '.join(names)} is not installed here. Install g++, or "
            "remove compile"
        )
    if device != "cpu" and importlib.util.find_spec("triton") is None:
        raise RefusedError("spec.trainer.compile needs Triton on GPUs, which is not installed. Remove compile")


def compile_layers(model: PreTrainedModel) -> None:
    """Compile a model's layers (those that it names as not to be split) before they are checkpointed and sharded.

    ``torch.compile`` fuses norms, activations and residuals. Layers of a kind share their compiled code, so the time
    that it takes does not grow with their number. Attention stays outside: its loop over the blocks of a row would be
    compiled anew for every row. The number of a row's tokens is a symbol of the compiled code, so rows of any length
    use the same. Checkpointing calls the compiled layer twice, and FSDP2's hooks run around it.
    """
    for name, attention in ((PACKED_ATTENTION, packed_attention), (VARLEN_ATTENTION, varlen_attention)):
        AttentionInterface.register(name, torch.compiler.disable(attention))  # type: ignore[no-untyped-call]
    for module in model.modules():
        if type(module).__name__ in (model._no_split_modules or ()):
            module.forward = torch.compile(module.forward, dynamic=True)
