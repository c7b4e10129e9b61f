"""Write and read checkpoints: the complete state from which a run continues exactly.

``checkpoints/step-000010/`` holds a safetensors file of each rank (weights in float32, optimizer), ``policy.json``
(their index, schedule, random state) and ``state.json`` (the conductor's state: data cursor, policy version, ledger,
incarnation). A checkpoint is whole or absent, and any number of ranks can load it. One that holds ``policy.pt`` is of
an earlier version.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch

from plaudit_wire.errors import RefusedError
from plaudit_workers.files import recover_all, remove, remove_leftovers, whole_folder
from plaudit_workers.training.model.policy_model import PolicyModel
from plaudit_workers.training.model.state_copy import StateCopy
from plaudit_workers.training.state import refuse_replaced
from plaudit_workers.weights.index import INDEX_FILE, ShardError

_STEP_NAME = re.compile(r"step-(\d{6,})")
_EARLIER_FILE = "policy.pt"
_STATE_FILE = "state.json"


def write_checkpoint(folder: Path, step: int, copy: StateCopy, extra: dict[str, Any], keep: int | None = None) -> Path:
    """Write a checkpoint, then delete the oldest ones. In any thread.

    Args:
        step: the last closed step; an existing checkpoint of the same step is replaced.
        extra: plain JSON (text keys).
        keep: newest checkpoints to keep, at least 1; None keeps all. See ``checkpoints`` for the order.

    Raises:
        RefusedError: the disk is full; older checkpoints are unchanged.
        StaleIncarnationError: a later trainer has begun; all checkpoints are unchanged.
        ShardError: another rank could not write its rows.
    """
    target = folder / f"step-{step:06d}"
    try:
        with whole_folder(target) as temporary:
            copy.write(temporary)
            state = {"step": step, "extra": extra, "index": _digest(temporary)}
            (temporary / _STATE_FILE).write_text(json.dumps(state, allow_nan=False))
            refuse_replaced(folder, int(extra.get("incarnation", 0)))  # one may have begun while this one wrote
    finally:
        copy.abandon()
    if keep is not None:
        remove_leftovers(folder)
        for path in checkpoints(folder)[:-keep]:
            remove(path)
    return target


def load_checkpoint(path: Path, model: PolicyModel) -> dict[str, Any]:
    """Load a checkpoint into a model of the same architecture, with any number of ranks; return its ``extra``."""
    extra, index = _read_state(path)
    try:
        if (path / _EARLIER_FILE).is_file():
            model.load_state_dict(torch.load(path / _EARLIER_FILE, map_location="cpu", weights_only=True, mmap=True))
        else:
            if _digest(path) != index:
                raise ShardError(f"{INDEX_FILE} is damaged")
            model.load(str(path))
    # A damaged file meets torch's unpickler, zip reader and shape checks; each fails with its own exception.
    except (OSError, RuntimeError, KeyError, ValueError, EOFError) as error:
        raise RefusedError(
            f"checkpoint {path} cannot be loaded: {error}. Is it of this model? Choose another one with "
            "trainer.checkpoint.resumeFrom, or remove the folder to continue from the previous checkpoint"
        ) from error
    return extra


def read_extra(path: Path) -> dict[str, Any]:
    """Return the ``extra`` of a checkpoint without loading the model; raise ``RefusedError`` if it is none."""
    return _read_state(path)[0]


def _read_state(path: Path) -> tuple[dict[str, Any], str | None]:
    """Return the ``extra`` of a checkpoint and the digest of its index, which those of earlier versions do not have."""
    try:
        state = json.loads((path / _STATE_FILE).read_text())
        return state["extra"], state.get("index")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RefusedError(
            f"{path} is not a checkpoint: its {_STATE_FILE} cannot be read ({error}). Give a folder like "
            "…/checkpoints/step-000010"
        ) from error


def _digest(folder: Path) -> str:
    return hashlib.sha256((folder / INDEX_FILE).read_bytes()).hexdigest()


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints, oldest first: by incarnation, then by step.

    The step alone does not order them: a trainer that was replaced may have saved a higher step than its successor.
    """
    named = [(int(name[1]), path) for path in folder.glob("step-*") if (name := _STEP_NAME.fullmatch(path.name))]
    whole = [(step, path) for step, path in named if (path / _STATE_FILE).is_file()]
    return [path for _, path in sorted(whole, key=lambda item: (_incarnation(item[1]), item[0]))]


def recovered_checkpoints(folder: Path) -> list[Path]:
    """Finish replacements that a killed trainer began, then return ``checkpoints``. For the trainer that takes over."""
    recover_all(folder)
    return checkpoints(folder)


def _incarnation(path: Path) -> int:
    try:
        return int(read_extra(path).get("incarnation", 0))
    except RefusedError:
        return -1  # a damaged checkpoint is the first to be deleted; loading it is refused by name
