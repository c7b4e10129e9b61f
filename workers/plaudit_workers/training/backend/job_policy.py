"""The job's real policy behind the conductor's few questions: batches, weights, checkpoints. Needs torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from plaudit_wire.messages import Announcement, PolicyVersion
from plaudit_workers.job.spec.rljob import RLJob
from plaudit_workers.stream.group import Group
from plaudit_workers.training.backend.checkpoint import (
    load_checkpoint,
    read_extra,
    recovered_checkpoints,
    save_checkpoint,
)
from plaudit_workers.training.backend.policy import Policy
from plaudit_workers.training.backend.publish import prune_weights, write_weights
from plaudit_workers.training.model.batch import make_batch


class JobPolicy:
    """See ``TrainablePolicy``.

    Args:
        job: a resolved job.
        policy: rank 0's.
        run_folder: where weights and checkpoints lie.
    """

    def __init__(self, job: RLJob, policy: Policy, run_folder: Path) -> None:
        self._advantage = job.spec.algorithm.advantage
        self._temperature = job.spec.rollout.sampling.temperature
        self._keep = job.spec.trainer.checkpoint.keep
        self._policy = policy
        self._weights = run_folder / "weights"
        self._checkpoints = run_folder / "checkpoints"

    def update(self, groups: Sequence[Group]) -> dict[str, float]:
        """One optimizer step on these groups."""
        return self._policy.update(make_batch(groups, self._advantage, self._temperature))

    def publish(self, version: PolicyVersion) -> Announcement:
        """Writes safetensors to ``weights/<version>``."""
        return write_weights(self._policy, self._weights, version)

    def prune(self, in_use: Collection[str]) -> None:
        """Deletes published weights that nobody needs."""
        prune_weights(self._weights, in_use)

    def save(self, step: int, extra: dict[str, Any]) -> Path:
        """Writes ``checkpoints/step-<step>`` and deletes the oldest."""
        return save_checkpoint(self._checkpoints, step, self._policy, extra, self._keep)

    def checkpoints(self) -> dict[Path, dict[str, Any]]:
        """The run's whole checkpoints."""
        return {path: read_extra(path) for path in recovered_checkpoints(self._checkpoints)}

    def load(self, checkpoint: Path) -> dict[str, Any]:
        """Takes over a checkpoint."""
        return load_checkpoint(checkpoint, self._policy)

    def close(self) -> None:
        """Lets the other ranks go."""
        self._policy.close()
