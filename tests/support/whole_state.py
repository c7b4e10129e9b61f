"""Read the whole state of a policy, and save it as a checkpoint in one call."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from plaudit_workers.training.checkpoint import write_checkpoint
from plaudit_workers.training.model.head import DTYPES
from plaudit_workers.training.model.lora import published_name
from plaudit_workers.training.model.policy_model import PolicyModel
from plaudit_workers.training.model.sharding import gathered
from plaudit_workers.weights.files import ShardReader
from plaudit_workers.weights.index import MODEL_PREFIX


def gather(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of all tensors, unsharded, on the CPU. A collective call if they are sharded."""
    return {name: tensor.cpu().clone() for name, tensor in gathered(tensors, tensors)}


def full_state(policy: PolicyModel) -> dict[str, Tensor]:
    """Return the present weights as they are published: unsharded, on the CPU, in ``model.dtype``, tied ones once.

    They take the way of a checkpoint. With adapters, these alone under the names of peft's file format.
    """
    dtype, state = DTYPES[policy._spec.model.dtype], {}
    with TemporaryDirectory() as folder:
        policy.copy_state().write(Path(folder))
        reader = ShardReader(Path(folder))
        for stored in reader.index.tensors:
            if stored.startswith(MODEL_PREFIX):
                name, tensor = stored.removeprefix(MODEL_PREFIX), reader.whole(stored)
                state[published_name(name) if policy._adapters else name] = (
                    tensor.to(dtype) if tensor.is_floating_point() else tensor
                )
    return state


def save_checkpoint(
    folder: Path, step: int, policy: PolicyModel, extra: dict[str, Any], keep: int | None = None
) -> Path:
    """Copy the policy's state and write it; see ``write_checkpoint``."""
    return write_checkpoint(folder, step, policy.copy_state(), extra, keep)
