"""Train the job's model with torch, as the conductor's backend: updates, published weights, checkpoints.

``TorchBackend`` joins the parts of ``model``. ``DiscardedUpdates`` ends a run that no longer learns, ``DeltaPublisher``
publishes what changed, and prompts with images are compared with those that the rollouts sampled from.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from plaudit_job.spec.algorithm import AlgorithmSpec, LossSpec
from plaudit_job.spec.rljob import RLJob
from plaudit_wire.errors import JobFailedError, RefusedError
from plaudit_wire.logs import get_logger
from plaudit_wire.messages import Announcement, PolicyVersion
from plaudit_workers.files import whole_folder
from plaudit_workers.images import ImageProcessor
from plaudit_workers.stream.groups import Group
from plaudit_workers.training.checkpoint import load_checkpoint, read_extra, recovered_checkpoints, write_checkpoint
from plaudit_workers.training.model.batch import KlController, RewardPenalty, TrainingBatch, make_batch
from plaudit_workers.training.model.optimizer import peak_flops, speed_figures
from plaudit_workers.training.model.policy_model import PolicyModel
from plaudit_workers.training.publish import offer_weights, prune_weights, write_offered, write_weights
from plaudit_workers.training.schedule import join_epochs
from plaudit_workers.weights.deltas import DELTA_FILE, DeltaRecord
from plaudit_workers.weights.image import WeightForm
from plaudit_workers.weights.published import PROBE_FILE, combined_digest, is_whole
from plaudit_workers.weights.send import TransferError

logger = get_logger(__name__)
MOST_IN_A_ROW = 5
"""So many discarded updates in a row end the run; fewer if the run has fewer."""
_LARGEST = 3.4028235e38
"""Of float32, in which losses are computed."""
_LOWER_RATE = "Lower spec.algorithm.optimizer.learningRate"


class TorchBackend:
    """Train the policy as a ``TrainerBackend``; see there for the methods.

    Args:
        redis_url: where rollouts receive weights directly, they reach the trainer as this host does.
    """

    def __init__(self, job: RLJob, model: PolicyModel, run_folder: Path, redis_url: str = "") -> None:
        self._algorithm = algorithm = job.spec.algorithm
        self._turn_weights = job.spec.reward.environment_weights if algorithm.advantage_per == "turn" else None
        self._kl = KlController(algorithm.loss.kl_coefficient, algorithm.loss.adaptive_kl)
        self._discarded = DiscardedUpdates(algorithm)
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
        """Make ``algorithm.epochs`` optimizer steps on these groups; return their joined figures."""
        if self._model.images is not None:
            refuse_other_expansions(groups, self._model.images)
        algorithm, penalty = self._algorithm, None
        if algorithm.loss.penalises_reward:
            penalty = RewardPenalty(self._kl.coefficient, self._model.divergences)
        batch = make_batch(
            groups,
            algorithm.advantage,
            self._temperature,
            penalty,
            self._turn_weights,
            mask_truncated=algorithm.mask_truncated,
            filter_truncated=algorithm.filter_truncated,
        )
        if (divergence := batch.statistics.get("actor/reward_kl_penalty")) is not None:
            self._kl.update(divergence, len({(sequence.group, sequence.index) for sequence in batch.sequences}))
        return join_epochs([self._timed(batch) for _ in range(algorithm.epochs)])

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


class DeltaPublisher:
    """Publish the versions of one trainer as deltas, the first and every ``full_every``-th one whole.

    See ``weights.deltas`` for what a version's folder holds. The announced digest is that of the whole files, so a
    rollout checks the same bytes whatever way they took.
    """

    def __init__(self, model: PolicyModel, folder: Path, full_every: int) -> None:
        self._model = model
        self._folder = folder
        self._full_every = full_every
        self._last: PolicyVersion | None = None
        self._delta: DeltaRecord | None = None
        """Of the last version; None if it has no delta."""
        self._probe = b""
        self._until_full = 0

    def publish(self, version: PolicyVersion) -> Announcement:
        """Publish the model's weights; see ``publish.write_weights``."""
        copied = self._model.copy_weights()
        digest = combined_digest(copied.digests)
        self._delta = DeltaRecord(str(self._last), digest) if copied.has_delta else None
        self._probe = msgspec.json.encode(self._model.probe())
        target = self._folder / str(version)
        self._write(target, whole=self._delta is None or self._until_full == 0)
        self._model.hold_proximal(version)
        self._last = version
        return Announcement(version, str(target), digest)

    def write_whole(self, announcement: Announcement) -> None:
        """Write the announced version again, whole; nothing if it is whole, or no longer the newest."""
        target = Path(announcement.path)
        if announcement.version == self._last and not is_whole(target):
            self._write(target, whole=True)

    def _write(self, target: Path, *, whole: bool) -> None:
        with whole_folder(target) as folder:
            self._model.write_copied(WeightForm(str(folder), whole, self._delta is not None))
            (folder / PROBE_FILE).write_bytes(self._probe)
            if self._delta is not None:
                (folder / DELTA_FILE).write_bytes(msgspec.json.encode(self._delta))
            if whole:
                for name, content in self._model.files().items():
                    (folder / name).write_bytes(content)
        self._until_full = self._full_every - 1 if whole else self._until_full - 1


class DiscardedUpdates:
    """Report updates that are discarded because a gradient is not finite, and end a run that no longer learns.

    A discarded update changes nothing, so a run in which all are discarded would end as if it had trained.
    """

    def __init__(self, algorithm: AlgorithmSpec) -> None:
        self._loss = algorithm.loss
        self._most = min(MOST_IN_A_ROW, algorithm.steps * algorithm.updates_per_step)
        self._in_a_row = 0

    def note(self, figures: Mapping[str, float]) -> None:
        """Take the figures of an update; log it if it was discarded, and fail the job after too many in a row."""
        if "actor/skipped_updates" not in figures:
            return  # nothing in it had a gradient
        self._in_a_row = self._in_a_row + 1 if figures["actor/skipped_updates"] else 0
        if not self._in_a_row:
            return
        cause, remedy = explain(figures, self._loss)
        logger.warning("update discarded", cause=cause, remedy=remedy, in_a_row=self._in_a_row)
        if self._in_a_row >= self._most:
            raise JobFailedError(
                f"{self._in_a_row} updates in a row were discarded, because {cause}. {remedy}, then continue with "
                "--resume"
            )


def explain(figures: Mapping[str, float], loss: LossSpec) -> tuple[str, str]:
    """Return the cause of a discarded update and its remedy, from the first of its figures that is not finite."""
    own = loss.kind == "python"
    mend = f"Mend function {loss.function} in spec.algorithm.loss.path {loss.path}"
    if not _finite(figures, "critic/advantages/min", "critic/advantages/max"):
        least, most = (figures.get(f"critic/score/{name}", math.nan) for name in ("min", "max"))
        return f"an advantage is not finite in float32 (rewards from {least:g} to {most:g})", "Bound the rewards"
    if not _finite(figures, "actor/behaviour_kl"):
        return "a log-probability of the policy or of a rollout is not finite", f"{_LOWER_RATE}, or start anew"
    if not _finite(figures, "actor/pg_loss", "actor/kl_loss"):
        return "the loss is not finite", mend if own else _LOWER_RATE
    return "the loss is finite, but its gradient is not", mend if own else _LOWER_RATE


def _finite(figures: Mapping[str, float], *names: str) -> bool:
    return all(abs(figures.get(name, 0.0)) <= _LARGEST for name in names)


def refuse_other_expansions(groups: Iterable[Group], images: ImageProcessor) -> None:
    """Check that each sample's prompt is the one that the trainer makes of the same images.

    A sample carries the tokens that vLLM computed, and the trainer trains them with pixels of its own. Other versions
    of the processor, or other files of it, would make other tokens of an image: the policy would learn from another
    prompt.
    """
    for group in groups:
        if not group.prompt.images:
            continue
        own = images.expand(np.frombuffer(group.prompt.prompt_ids, "<i4"), group.prompt.images)
        for sample in group.samples:
            if sample.body is not None:
                _refuse_other(np.frombuffer(sample.body.prompt_ids, "<i4"), own, group.id, images.token_id)


def _refuse_other(
    sampled: np.ndarray[tuple[int], np.dtype[np.int32]],
    own: np.ndarray[tuple[int], np.dtype[np.int32]],
    group: str,
    token_id: int,
) -> None:
    if np.array_equal(sampled, own):
        return
    numbers = [int((ids == token_id).sum()) for ids in (sampled, own)]
    raise RefusedError(
        f"group {group}: vLLM made {numbers[0]} tokens of the prompt's images, the trainer {numbers[1]}, or they lie "
        "elsewhere. Give trainer and rollouts the same versions of transformers and vLLM, and the same files "
        "of the model's processor"
    )
