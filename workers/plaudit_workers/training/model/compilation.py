"""Compile each layer by itself with ``torch.compile``, which fuses norms, activations and residuals.

Called by ``policy_model``.
Layers of a kind share their compiled code, so the time that it takes does not grow with their number. Attention stays
outside: its loop over the blocks of a row would be compiled anew for every row. The number of a row's tokens is a
symbol of the compiled code, so rows of any length use the same.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping

import torch
from transformers import AttentionInterface, PreTrainedModel

from plaudit_reward.packed_attention import PACKED_ATTENTION, packed_attention
from plaudit_reward.varlen_attention import VARLEN_ATTENTION, varlen_attention
from plaudit_wire.errors import RefusedError


def refuse_without_compiler(device: str, environment: Mapping[str, str]) -> None:
    """Check for the programs with which torch builds what it compiles.

    Args:
        environment: ``PATH``, ``CXX`` and ``CC`` are read, as torch and Triton do.

    Raises:
        RefusedError: one is missing.
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

    Checkpointing calls the compiled layer twice, and FSDP2's hooks run around it.
    """
    for name, attention in ((PACKED_ATTENTION, packed_attention), (VARLEN_ATTENTION, varlen_attention)):
        AttentionInterface.register(name, torch.compiler.disable(attention))  # type: ignore[no-untyped-call]
    for module in model.modules():
        if type(module).__name__ in (model._no_split_modules or ()):
            module.forward = torch.compile(module.forward, dynamic=True)
