"""Train the job's model with torch: batches, published weights, checkpoints. Called by the conductor, on rank 0."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from plaudit_wire.logs import get_logger
from plaudit_wire.messages import Announcement, PolicyVersion
from plaudit_workers.job.spec.rljob import RLJob
from plaudit_workers.stream.group import Group
from plaudit_workers.training.backend.checkpoint import (
    load_checkpoint,
    read_extra,
    recovered_checkpoints,
    write_checkpoint,
)
from plaudit_workers.training.backend.delta_publisher import DeltaPublisher
from plaudit_workers.training.backend.discarded_updates import DiscardedUpdates
from plaudit_workers.training.backend.expansion import refuse_other_expansions
from plaudit_workers.training.backend.publish import offer_weights, prune_weights, write_offered, write_weights
from plaudit_workers.training.model.batches.batch import RewardPenalty, TrainingBatch, make_batch
from plaudit_workers.training.model.batches.kl_controller import KlController
from plaudit_workers.training.model.policy_model import PolicyModel
from plaudit_workers.training.model.utilization import peak_flops, speed_figures
from plaudit_workers.training.run.joined_figures import join_epochs
from plaudit_workers.weight_transfer.exchange import TransferError

logger = get_logger(__name__)


class TorchBackend:
    """Train the policy as a ``TrainerBackend``; see there for the methods.

    Args:
        redis_url: where rollouts receive weights directly, they reach the trainer as this host does.
    """

    def __init__(self, job: RLJob, model: PolicyModel, run_folder: Path, redis_url: str = "") -> None:
        self._advantage = job.spec.algorithm.advantage
        per_turn = job.spec.algorithm.advantage_per == "turn"
        self._turn_weights = job.spec.reward.environment_weights if per_turn else None
        loss = job.spec.algorithm.loss
        self._kl = KlController(loss.kl_coefficient, loss.adaptive_kl)
        self._penalises_reward = loss.penalises_reward
        self._epochs = job.spec.algorithm.epochs
        self._discarded = DiscardedUpdates(job.spec.algorithm)
        self._temperature = job.spec.rollout.sampling.temperature
        self._keep = job.spec.trainer.checkpoint.keep
        self._ranks = job.spec.trainer.ranks
        self._peak_flops = peak_flops()
        self._model = model
        self._direct = job.spec.trainer.weights.transfer == "direct"
        self._token = secrets.token_hex(32)
        self._redis_url = redis_url
        self._offered: Announcement | None = None
        """The version that rollouts receive from memory."""
        self._writing = threading.Lock()
        self._saver = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._saving: Future[Path] | None = None
        self._weights = run_folder / "weights"
        full_every = job.spec.trainer.weights.full_every
        self._deltas = DeltaPublisher(model, self._weights, full_every) if full_every > 1 else None
        self._checkpoints = run_folder / "checkpoints"

    def update(self, groups: Sequence[Group]) -> dict[str, float]:
        """Make ``algorithm.epochs`` optimizer steps on these groups; return their joined figures.

        Raises:
            RefusedError: a rollout expanded the images of a prompt to other tokens than the trainer.
        """
        if self._model.images is not None:
            refuse_other_expansions(groups, self._model.images)
        penalty = RewardPenalty(self._kl.coefficient, self._model.divergences) if self._penalises_reward else None
        batch = make_batch(groups, self._advantage, self._temperature, penalty, self._turn_weights)
        if (divergence := batch.statistics.get("actor/reward_kl_penalty")) is not None:
            self._kl.update(divergence, len({(sequence.group, sequence.index) for sequence in batch.sequences}))
        return join_epochs([self._timed(batch) for _ in range(self._epochs)])

    def _timed(self, batch: TrainingBatch) -> dict[str, float]:
        started = time.monotonic()
        figures = self._model.update(batch)  # ends with the gradient's norm, so the device has finished
        self._discarded.note(figures)
        return figures | speed_figures(figures, time.monotonic() - started, self._ranks, self._peak_flops)

    def publish(self, version: PolicyVersion) -> Announcement:
        """Write safetensors or what changed of them to ``weights/<version>``, or offer them from memory."""
        if self._direct:
            self._offered = offer_weights(self._model, version, self._token, self._redis_url)
            return self._offered
        if self._deltas is not None:
            return self._deltas.publish(version)
        return write_weights(self._model, self._weights, version)

    def write_files(self, announcement: Announcement) -> Announcement:
        """Write weights that are offered from memory to ``weights/<version>`` too."""
        with self._writing:
            return write_offered(announcement, self._model.files(), self._weights)

    def write_whole(self, announcement: Announcement) -> None:
        """Write weights that were published as a delta to ``weights/<version>`` whole."""
        if self._deltas is not None:
            self._deltas.write_whole(announcement)

    def free_memory(self) -> None:
        """Return memory of the GPUs that an update needed."""
        self._model.free_memory()

    def prune(self, in_use: Collection[str]) -> None:
        """Delete published weights that are not needed."""
        prune_weights(self._weights, in_use)

    def save(self, step: int, extra: dict[str, Any]) -> Path:
        """Begin ``checkpoints/step-<step>``; write offered weights, for ``plaudit export``."""
        self.finish_saving()
        self._write_offered()
        copy, extra = self._model.copy_state(), extra | self._kl.snapshot()
        self._saving = self._saver.submit(write_checkpoint, self._checkpoints, step, copy, extra, self._keep)
        return self._checkpoints / f"step-{step:06d}"

    def _write_offered(self) -> None:
        if self._offered is None or (self._weights / str(self._offered.version)).exists():
            return
        try:
            self.write_files(self._offered)
        except TransferError as error:  # the checkpoint does not need them
            version = str(self._offered.version)
            logger.warning("a version has no files; export the checkpoint instead", version=version, error=str(error))

    def finish_saving(self) -> None:
        """Wait until the checkpoint begun last is in place."""
        if self._saving is not None:
            self._saving.result()

    def checkpoints(self) -> dict[Path, dict[str, Any]]:
        """Return the run's checkpoints."""
        return {path: read_extra(path) for path in recovered_checkpoints(self._checkpoints)}

    def load(self, checkpoint: Path) -> dict[str, Any]:
        """Load a checkpoint."""
        extra = load_checkpoint(checkpoint, self._model)
        self._kl.restore(extra)
        return extra

    def close(self) -> None:
        """Finish writing, then release the other ranks."""
        self._saver.shutdown()
        self._model.close()
