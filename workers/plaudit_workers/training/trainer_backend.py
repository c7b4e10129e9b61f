"""What the conductor asks of a policy. ``JobPolicy`` trains the job's model; ``ScriptedPolicy`` only takes its time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

from plaudit_wire.messages import Announcement, PolicyVersion
from plaudit_workers.stream.group import Group


class TrainablePolicy(Protocol):
    """All calls are synchronous; all but ``prune`` come from one thread of the conductor's, one at a time."""

    def update(self, groups: Sequence[Group]) -> dict[str, float]:
        """Trains on one mini-batch (never empty) and returns its figures."""
        ...

    def publish(self, version: PolicyVersion) -> Announcement:
        """Writes the weights where rollouts find them."""
        ...

    def prune(self, in_use: Collection[str]) -> None:
        """Deletes published weights that nobody needs; ``in_use`` are versions that live workers hold or load."""
        ...

    def save(self, step: int, extra: dict[str, Any]) -> Path:
        """Writes a checkpoint after ``step`` with the conductor's own state beside the model's; returns its folder."""
        ...

    def checkpoints(self) -> dict[Path, dict[str, Any]]:
        """The run's whole checkpoints, each with the conductor's part."""
        ...

    def load(self, checkpoint: Path) -> dict[str, Any]:
        """Takes over a checkpoint; returns the conductor's part of it."""
        ...

    def close(self) -> None:
        """Lets other ranks go."""
        ...
