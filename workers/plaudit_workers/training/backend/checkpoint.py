"""Checkpoints: all that a run needs to go on exactly where it was. Called by the conductor.

``checkpoints/step-000010/`` holds ``policy.pt`` (weights in float32, optimizer, schedule, random state) and
``state.json`` (what the conductor gives: data cursor, policy version, ledger, incarnation). The folder is there as a
whole or not at all, and does not depend on the number of ranks.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from plaudit_workers.process import RefusedError
from plaudit_workers.training.backend.policy import Policy
from plaudit_workers.whole_files import remove, remove_leftovers, whole_folder

_STEP_NAME = re.compile(r"step-(\d{6,})")
_POLICY_FILE = "policy.pt"
_STATE_FILE = "state.json"


def save_checkpoint(folder: Path, step: int, policy: Policy, extra: dict[str, Any], keep: int | None = None) -> Path:
    """Writes a checkpoint, then deletes those that are no longer to be kept.

    Args:
        folder: ``checkpoints`` of the run's folder.
        step: the step after which the run stands; a checkpoint of the same step is replaced.
        policy: whose state.
        extra: plain JSON (text keys), given back by ``load_checkpoint``.
        keep: the newest of all checkpoints that stay, at least 1; None deletes none.

    Returns:
        The checkpoint's folder.

    Raises:
        RefusedError: the disk is full; older checkpoints are untouched.
    """
    target = folder / f"step-{step:06d}"
    with whole_folder(target) as temporary:
        with (temporary / _POLICY_FILE).open("wb") as file:
            torch.save(policy.state_dict(), file)
        (temporary / _STATE_FILE).write_text(json.dumps({"step": step, "extra": extra}, allow_nan=False))
    if keep is not None:
        remove_leftovers(folder)
        for path in checkpoints(folder)[:-keep]:
            remove(path)
    return target


def load_checkpoint(path: Path, policy: Policy) -> dict[str, Any]:
    """Puts a checkpoint's state into the policy.

    Args:
        path: a checkpoint's folder.
        policy: of the same model, with any number of ranks.

    Returns:
        What ``save_checkpoint`` was given as ``extra``.

    Raises:
        RefusedError: it is not a checkpoint, cannot be read, or is of another model.
    """
    extra = read_extra(path)
    try:
        state = torch.load(path / _POLICY_FILE, map_location="cpu", weights_only=True, mmap=True)
        policy.load_state_dict(state)
    # A damaged file meets torch's unpickler, zip reader and shape checks; each fails in its own way.
    except (OSError, RuntimeError, KeyError, ValueError, EOFError) as error:
        raise RefusedError(
            f"checkpoint {path} cannot be loaded: {error}. Is it of this model? Name another one with "
            "trainer.checkpoint.resumeFrom, or remove the folder to go on from the one before"
        ) from error
    return extra


def read_extra(path: Path) -> dict[str, Any]:
    """What ``save_checkpoint`` was given as ``extra``, without loading the policy.

    Raises:
        RefusedError: the folder is no checkpoint.
    """
    try:
        extra: dict[str, Any] = json.loads((path / _STATE_FILE).read_text())["extra"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RefusedError(
            f"{path} is no checkpoint: its {_STATE_FILE} cannot be read ({error}); name a folder like "
            "…/checkpoints/step-000010"
        ) from error
    return extra


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the highest step; None when there is none. Incomplete ones do not count."""
    found = checkpoints(folder)
    return found[-1] if found else None


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints, oldest step first."""
    named = [(int(name[1]), path) for path in folder.glob("step-*") if (name := _STEP_NAME.fullmatch(path.name))]
    return [path for _, path in sorted(named) if (path / _STATE_FILE).is_file()]
