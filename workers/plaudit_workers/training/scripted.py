"""Stand in for a trainer backend without a model: sleep instead of computing. For simulations and tests of schedules.

Passed to ``conduct(run, backend, stop)``; no job selects it. Its state is the list of groups it was trained on, so a
checkpoint shows exactly which groups the surviving line has learnt from.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from plaudit_wire.messages import Announcement, PolicyVersion
from plaudit_workers.files import remove, whole_folder
from plaudit_workers.stream.groups import Group
from plaudit_workers.training.state import refuse_replaced
from plaudit_workers.weights.published import weights_digest

_KEPT = 2


class ScriptedBackend:
    """Sleep as a ``TrainerBackend`` instead of computing.

    Args:
        run_folder: checkpoints and empty weights are written below it.
        update_s: seconds that an update on these groups takes.
    """

    def __init__(self, run_folder: Path, update_s: Callable[[Sequence[Group]], float] = lambda groups: 0.0) -> None:
        self._folder = run_folder
        self._update_s = update_s
        self._saving = threading.Lock()
        self._begun: tuple[Path, str, str] | None = None
        """A checkpoint to be written: its folder, the groups, the conductor's state."""
        self.trained: list[list[str]] = []
        """The groups of each update so far, restored ones included."""

    def update(self, groups: Sequence[Group]) -> dict[str, float]:
        """Sleep, then record the groups."""
        time.sleep(self._update_s(groups))
        self.trained.append([group.id for group in groups])
        return {"scripted/groups": float(len(groups))}

    def publish(self, version: PolicyVersion) -> Announcement:
        """Write a file in place of weights."""
        folder = self._folder / "weights" / str(version)
        content = json.dumps({"version": str(version)}).encode()
        with whole_folder(folder) as temporary:
            (temporary / "model.safetensors").write_bytes(content)
        return Announcement(version, str(folder), weights_digest(folder))

    def write_files(self, announcement: Announcement) -> Announcement:
        """Return the announcement: ``publish`` always writes files."""
        return announcement

    def write_whole(self, announcement: Announcement) -> None:
        """Do nothing: ``publish`` always writes whole weights."""

    def free_memory(self) -> None:
        """Do nothing: there is no GPU."""

    def prune(self, in_use: Collection[str]) -> None:
        """Delete all but the newest two versions and those in use."""
        names = [path.name for path in (self._folder / "weights").iterdir() if path.name[0].isdigit()]
        by_age = sorted(names, key=lambda name: tuple(int(part) for part in name.split(".")))
        for name in by_age[:-_KEPT]:
            if name not in in_use:
                remove(self._folder / "weights" / name)

    def save(self, step: int, extra: dict[str, Any]) -> Path:
        """Copy the list of groups it was trained on; ``finish_saving`` writes it."""
        self.finish_saving()
        target = self._folder / "checkpoints" / f"step-{step:06d}"
        self._begun = (target, json.dumps(self.trained), json.dumps({"step": step, "extra": extra}))
        return target

    def finish_saving(self) -> None:
        """Write the list that the last ``save`` copied, once."""
        with self._saving:
            if self._begun is None:
                return
            target, trained, state = self._begun
            with whole_folder(target) as temporary:
                (temporary / "trained.json").write_text(trained)
                (temporary / "state.json").write_text(state)
                refuse_replaced(target.parent, json.loads(state)["extra"]["incarnation"])
            self._begun = None

    def checkpoints(self) -> dict[Path, dict[str, Any]]:
        """Return the checkpoints."""
        found = sorted((self._folder / "checkpoints").glob("step-*"))
        return {path: _read_extra(path) for path in found}

    def load(self, checkpoint: Path) -> dict[str, Any]:
        """Read that list."""
        self.trained = json.loads((checkpoint / "trained.json").read_text())
        return _read_extra(checkpoint)

    def close(self) -> None:
        """Do nothing: there are no other ranks."""


def _read_extra(checkpoint: Path) -> dict[str, Any]:
    extra: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())["extra"]
    return extra
