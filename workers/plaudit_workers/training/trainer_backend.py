"""Define the protocol between the conductor and what it trains: ``TorchBackend``, or simulated ``ScriptedBackend``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

from plaudit_wire.messages import Announcement, PolicyVersion
from plaudit_workers.stream.group import Group


class TrainerBackend(Protocol):
    """Train a policy. All calls block.

    All but ``prune``, ``write_files`` and ``finish_saving`` come from one thread, one at a time.
    """

    def update(self, groups: Sequence[Group]) -> dict[str, float]:
        """Train on one mini-batch (never empty) and return its figures.

        Raises:
            JobFailedError: too many updates in a row had no finite gradient.
        """
        ...

    def publish(self, version: PolicyVersion) -> Announcement:
        """Write the weights where rollouts read them, or offer them from memory."""
        ...

    def write_files(self, announcement: Announcement) -> Announcement:
        """Write weights that are offered from memory as files too; return the announcement of both.

        Called while the next update runs.

        Raises:
            TransferError: the version was withdrawn meanwhile.
        """
        ...

    def write_whole(self, announcement: Announcement) -> None:
        """Write weights that were published as a delta whole, if they are still the newest ones and not yet whole."""
        ...

    def free_memory(self) -> None:
        """Return memory of the GPUs that an update needed, before rollouts take it."""
        ...

    def prune(self, in_use: Collection[str]) -> None:
        """Delete published weights that are not needed; ``in_use`` are the versions that live workers report."""
        ...

    def save(self, step: int, extra: dict[str, Any]) -> Path:
        """Begin a checkpoint after ``step`` with the conductor's state beside the model's; return its folder.

        The states are those of the call, although writing continues during the next updates. Waits for the checkpoint
        before it, and raises what that one raised.
        """
        ...

    def finish_saving(self) -> None:
        """Wait until the checkpoint begun last is in place. Called while updates run.

        Raises:
            StaleIncarnationError: a later trainer has begun; all checkpoints are unchanged.
            RefusedError: the disk is full; older checkpoints are unchanged.
        """
        ...

    def checkpoints(self) -> dict[Path, dict[str, Any]]:
        """Return the run's checkpoints, each with the conductor's state. Called once, before anything is saved."""
        ...

    def load(self, checkpoint: Path) -> dict[str, Any]:
        """Load a checkpoint and return the conductor's state in it."""
        ...

    def close(self) -> None:
        """Release the other ranks."""
        ...
